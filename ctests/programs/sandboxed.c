/* Holds that ranks have a peer group where a sandbox or an old kernel keeps something from them, and that memory outlives a rank whose
 * end nobody can see.
 *
 * With `hidden` rank 0 sees one device, so that it cannot tell whether NVLink joins it to the others.
 *
 * Arguments: `enosys`, `eperm`: pidfd_open fails so on all ranks; `one`: on rank 1 alone; `boot`: the boot id is empty; `proc`: nothing is
 * in /proc; `leaves`: the last rank ends without a word. `boot` and `proc` need the right to mount, else the program is skipped. */
#define _GNU_SOURCE
#include "../support/collective.h"
#include "../support/messages.h"

#include <errno.h>
#include <pthread.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static bool on_one, leaves;
static int forks;

/* From now on pidfd_open answers `code`. */
static void refuse_pidfds(int code) {
  struct sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pidfd_open, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)code),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  struct sock_fprog filter = {sizeof program / sizeof *program, program};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter)) abort();
  if (syscall(SYS_pidfd_open, getpid(), 0) != -1 || errno != code) abort(); /* uncounted: the run without has none */
}

static void mount_over(const char* from, const char* to, const char* type, unsigned long flags) {
  if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) || mount(from, to, type, flags, NULL)) {
    skip("nothing can be mounted here");
  }
}

static void count_forks(void) { forks++; }

static void hide_devices(void) {
  if (forks == 1) setenv("WINDLASS_SIM_DEVICES", "1", 1);
}

static void reduces(struct rank* self, ncclComm_t communicator, int ranks, size_t count) {
  struct transfer transfer = {.which = ALL_REDUCE, .type = ncclFloat, .op = ncclSum, .count = count, .rank = self->rank,
                              .ranks = ranks, .key = count};
  transfer_run(&transfer, communicator, self);
}

static void body(struct rank* self) {
  ncclComm_t child = NULL, rest = NULL;
  if (on_one && self->rank == 1) refuse_pidfds(ENOSYS);
  ncclComm_t all = world(self, 0);
  reduces(self, all, self->ranks, 1003);
  struct parcel ring[RANKS_MAX];
  for (int rank = 0; rank < self->ranks; rank++) {
    ring[rank] = (struct parcel){rank, (rank + 1) % self->ranks, 5000, 0, 3, ncclUint8, (uint64_t)rank};
  }
  exchange_whole(self, all, ring, self->ranks);
  NCCL(ncclCommSplit(all, 0, self->rank, &child, NULL));
  reduces(self, child, self->ranks, 2003);
  meet(self);
  ncclUniqueId id = share_id(self, 1, 0);
  if (leaves && self->rank == self->ranks - 1) {
    count_calls("ncclAllReduce", -2);
    count_calls("ncclSend", -1);
    count_calls("ncclRecv", -1);
    count_calls("ncclGroupStart", -1);
    count_calls("ncclGroupEnd", -1);
    count_calls("ncclCommSplit", -1);
    count_calls("ncclCommInitRank", -1);
    _exit(0);
  }
  if (leaves) {
    NCCL(ncclCommDestroy(child));
    NCCL(ncclCommAbort(all));
    NCCL(ncclCommInitRank(&rest, self->ranks - 1, id, self->rank));
    reduces(self, rest, self->ranks - 1, 3003);
    NCCL(ncclCommDestroy(rest));
  } else {
    NCCL(ncclCommDestroy(child));
    NCCL(ncclCommDestroy(all));
  }
}

int main(int count, char** words) {
  begin("sandboxed", 60);
  int ranks = rank_count(4);
  for (int i = 1; i < count; i++) {
    on_one |= strcmp(words[i], "one") == 0;
    leaves |= strcmp(words[i], "leaves") == 0;
    if (strcmp(words[i], "hidden") == 0) pthread_atfork(count_forks, NULL, hide_devices);
    if (strcmp(words[i], "enosys") == 0) refuse_pidfds(ENOSYS);
    if (strcmp(words[i], "eperm") == 0) refuse_pidfds(EPERM);
    if (strcmp(words[i], "boot") == 0) mount_over("/dev/null", "/proc/sys/kernel/random/boot_id", NULL, MS_BIND);
    if (strcmp(words[i], "proc") == 0) mount_over("none", "/proc", "tmpfs", 0);
  }
  run_ranks("sandboxed", PROCESSES, ranks, body, NULL);
  return finish();
}

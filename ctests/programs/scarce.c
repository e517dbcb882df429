/* Holds that a process which can open no descriptor, map no memory or start no thread lets no other rank hang. Whichever of
 * Windlass's calls fails on one rank, alone or with all later ones, an init, a split and a destroy end within 15 seconds on every
 * rank, and alike: with a communicator that works, or with an error. The part `few` limits the descriptors of the whole process,
 * NCCL's included.
 *
 * All later calls fail only on rank 1: rank 0 makes the id, and NCCL's connections come to Windlass in its process.
 *
 * Arguments: a part (init, split, destroy, few, all), then two steps between the numbers of the calls that fail: alone, and with
 * all later ones; 0 for none. A rank and a number after these run that one case of the part; with one more word that rank comes
 * last. */
#include "../support/harness.h"
#include "../support/scarce.h"

#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RANKS = 3, CALLS_MAX = 4, SECONDS = 15 };

struct shared {
  ncclUniqueId id;
  atomic_int has_id, arrived, seen, wrong;
  atomic_int codes[CALLS_MAX][RANKS];
};
static struct shared* shared;

/* One run: which rank's call fails, which call, and in which part. */
struct want {
  const char* part;
  int rank, first;
  bool and_later;
  /* The rank begins its init when the others wait for it: their connections may have taken the descriptors that it needs. */
  bool comes_last;
};

static bool (*begin_want)(int, bool);
static int (*end_want)(void);

static void all_here(int times) {
  atomic_fetch_add(&shared->arrived, 1);
  while (atomic_load(&shared->arrived) < RANKS * times) usleep(100);
}

/* Limits the process to `count` descriptors. */
static void has_few(int count) {
  struct rlimit limit = {(rlim_t)count, (rlim_t)count};
  if (setrlimit(RLIMIT_NOFILE, &limit)) _exit(2);
}

static void lacks(const struct want* want, int rank) {
  if (rank == want->rank && !begin_want(want->first, want->and_later)) _exit(STATUS_SKIPPED);
}

static void lacks_no_more(const struct want* want, int rank) {
  if (rank == want->rank) atomic_store(&shared->seen, end_want());
}

/* Shares the result of a call. Returns whether it succeeded on all its ranks; a mixture is an error of the test. */
static bool all_have(int call, int ranks, int rank, ncclResult_t code) {
  atomic_store(&shared->codes[call][rank], code ? (int)code : -1);
  int good = 0;
  for (int other = 0; other < ranks; other++) {
    int of_other;
    while (!(of_other = atomic_load(&shared->codes[call][other]))) usleep(100);
    good += of_other == -1;
  }
  if (good != 0 && good != ranks) atomic_store(&shared->wrong, 1);
  return good == ranks;
}

static void works(ncclComm_t communicator, int ranks, CUstream stream) {
  int one = 1, sum = 0;
  void* memory = device_alloc(sizeof one);
  upload(memory, &one, sizeof one);
  ncclResult_t code = ncclAllReduce(memory, memory, 1, ncclInt, ncclSum, communicator, as_cuda(stream));
  wait_for(stream);
  download(&sum, memory, sizeof sum);
  if (code || sum != ranks) atomic_store(&shared->wrong, 2);
  device_free(memory);
}

static void is_large(ncclComm_t communicator, CUstream stream) {
  size_t bytes = (size_t)64 << 20;
  void* memory = device_alloc(bytes);
  if (ncclAllReduce(memory, memory, bytes, ncclChar, ncclMax, communicator, as_cuda(stream))) atomic_store(&shared->wrong, 4);
  wait_for(stream);
  device_free(memory);
}

static void body(const struct want* want, int rank) {
  alarm(SECONDS);
  bool has_all_calls = !strcmp(want->part, "few");
  if (has_all_calls && rank == want->rank) has_few(want->first);
  use_device(rank);
  CUstream stream = new_stream();
  ncclComm_t world = NULL, pair = NULL, all = NULL;
  bool is_init = !strcmp(want->part, "init");
  if (is_init) lacks(want, rank);
  if (rank == 0) {
    ncclResult_t made = ncclGetUniqueId(&shared->id);
    atomic_store(&shared->has_id, made ? -1 : 1);
  }
  while (!atomic_load(&shared->has_id)) usleep(100);
  if (atomic_load(&shared->has_id) < 0) {
    lacks_no_more(want, rank);
    _exit(0);
  }
  if (want->comes_last && rank == want->rank) usleep(300000);
  ncclResult_t code = ncclCommInitRank(&world, RANKS, shared->id, rank);
  if (is_init) lacks_no_more(want, rank);
  if (!all_have(0, RANKS, rank, code)) _exit(is_init || has_all_calls ? 0 : 1);
  works(world, RANKS, stream);
  if (is_init) _exit(0);
  all_here(1);
  if (!strcmp(want->part, "split")) lacks(want, rank);
  code = ncclCommSplit(world, rank < 2 ? 0 : NCCL_SPLIT_NOCOLOR, rank, &pair, NULL);
  ncclResult_t second = ncclCommSplit(world, 0, rank, &all, NULL);
  /* A rank whose calls all fail cannot tell the others, so let them succeed before the others wait. */
  if (!strcmp(want->part, "split")) lacks_no_more(want, rank);
  bool has_pair = all_have(1, 2, rank, code), has_all = all_have(2, RANKS, rank, second);
  if (has_pair && rank < 2) works(pair, 2, stream);
  if (has_all) works(all, RANKS, stream);
  all_here(2);
  if (has_all_calls && has_all) {
    code = ncclCommDestroy(world);
    second = ncclCommDestroy(all);
    if (code || second) atomic_store(&shared->wrong, 3);
  }
  if (strcmp(want->part, "destroy")) _exit(0);
  /* This call has NCCL build the pair. */
  if (has_pair && rank < 2) is_large(pair, stream);
  all_here(3);
  lacks(want, rank);
  code = pair ? ncclCommDestroy(pair) : ncclSuccess;
  second = ncclCommDestroy(all);
  ncclResult_t third = ncclCommDestroy(world);
  lacks_no_more(want, rank);
  if (code || second || third) atomic_store(&shared->wrong, 3);
  _exit(0);
}

/* Runs the three ranks. Returns whether the call that was to fail was made at all. */
static bool run(const struct want* want) {
  pid_t ranks[RANKS];
  memset(shared, 0, sizeof *shared);
  for (int rank = 0; rank < RANKS; rank++) {
    ranks[rank] = fork();
    if (ranks[rank]) continue;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    body(want, rank);
  }
  bool is_right = true;
  for (int rank = 0; rank < RANKS; rank++) {
    int status = 0;
    while (waitpid(ranks[rank], &status, 0) < 0 && errno == EINTR) {}
    if (WIFEXITED(status) && WEXITSTATUS(status) == STATUS_SKIPPED) skip("this system lets us filter no system calls");
    if (status && is_right) {
      is_right = false;
      for (int other = 0; other < RANKS; other++) kill(ranks[other], SIGKILL);
      fprintf(stderr, "rank %d ended with status %x\n", rank, status);
    }
  }
  int wrong = atomic_load(&shared->wrong);
  is_right = is_right && !wrong;
  if (!is_right) {
    fprintf(stderr, "%s, rank %d lacks call %d%s: wrong %d, codes", want->part, want->rank, want->first, want->and_later ? " and later ones" : "", wrong);
    for (int call = 0; call < 3; call++) {
      for (int rank = 0; rank < RANKS; rank++) fprintf(stderr, " %d", atomic_load(&shared->codes[call][rank]));
    }
    fprintf(stderr, "\n");
  }
  CHECK(is_right);
  return atomic_load(&shared->seen) >= want->first || !is_right;
}

static bool is_chosen(int count, char** arguments, const char* part) {
  return count == 1 || !strcmp(arguments[1], part) || !strcmp(arguments[1], "all");
}

int main(int count, char** arguments) {
  begin("scarce", 900);
  begin_want = (bool (*)(int, bool))dlsym(RTLD_DEFAULT, "scarce_begin");
  end_want = (int (*)(void))dlsym(RTLD_DEFAULT, "scarce_end");
  if (!begin_want || !end_want) skip("support/scarce.c is not preloaded");
  if (device_count() < RANKS) skip("fewer than three devices");
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  static const char* const parts[] = {"init", "split", "destroy"};
  int steps[2] = {count > 2 ? atoi(arguments[2]) : 1, count > 3 ? atoi(arguments[3]) : 1};
  if (count > 5) {
    struct want want = {arguments[1], atoi(arguments[4]), atoi(arguments[5]), steps[1] > 0, count > 6};
    run(&want);
    return finish();
  }
  for (int part = 0; part < 3; part++) {
    if (!is_chosen(count, arguments, parts[part])) continue;
    int calls[2] = {60, 60};
    for (int rank = 0; rank < 2; rank++) {
      for (int later = 0; later < (rank ? 2 : 1); later++) {
        struct want want = {parts[part], rank, 1, later, false};
        /* A retry is a call, too. So with all later calls failing no number beyond that of the calls without failures is tried. */
        while (steps[later] && want.first < (later ? calls[rank] + 1 : 400) && run(&want)) want.first += steps[later];
        if (!later) calls[rank] = want.first - 1;
      }
    }
    fprintf(stderr, "%s: %d calls of rank 0, %d of rank 1\n", parts[part], calls[0], calls[1]);
    printf("%s\n", parts[part]);
    fflush(stdout);
  }
  static const int limits[] = {18, 22, 26, 30, 34, 38, 42, 46};
  for (int few = 0; few < 8; few++) {
    struct want want = {"few", few % 2, limits[few], false, false};
    if (is_chosen(count, arguments, "few")) run(&want);
  }
  for (int limit = 14; limit <= 20; limit += 2) {
    struct want want = {"few", 0, limit, false, true};
    if (is_chosen(count, arguments, "few")) run(&want);
  }
  return finish();
}

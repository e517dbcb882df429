/* Holds that no communicator needs a process that has left it or was never in it. The process that made the id, hosted the init
 * or was first in the parent may end, in order or killed, or execute another program. The others' calls work, and their memory,
 * descriptors and threads do not grow.
 *
 * Arguments: a part, and the number of rounds; none means all parts, of a few rounds. */
#define _GNU_SOURCE
#include "../support/harness.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 4, ROUNDS_MAX = 1024 };

/* How the process of rank 0 ends. */
enum end { EXITS, DIES, EXECUTES };

struct shared {
  ncclUniqueId id;
  atomic_int has_id, arrived, gone; /* counted over all rounds: how far the ranks are */
  atomic_int wrong;
  atomic_int lasting; /* ranks that have a communicator for the whole part */
  atomic_int over;    /* how many parts are over */
};
static struct shared* shared;
static int me;    /* this process's rank */
static bool dies; /* whether rank 0 is killed */

static void wrong(const char* what, long long seen, long long expected) {
  fprintf(stderr, "rank %d: %s is %lld, expected %lld\n", me, what, seen, expected);
  atomic_fetch_add(&shared->wrong, 1);
}

/* Calls by OK are not counted, as killed ranks report no counts. */
#define OK(call) \
  do { \
    ncclResult_t code = (call); \
    if (code) { \
      fprintf(stderr, "%s: %s\n", #call, ncclGetLastError(NULL)); \
      wrong(#call, code, 0); \
      _exit(3); \
    } \
  } while (0)

static void await(atomic_int* counter, int value) {
  while (atomic_load(counter) < value) usleep(200);
}

/* An all-reduce of ones, whose sums are checked. */
static void works(ncclComm_t communicator, int ranks, CUstream stream) {
  enum { COUNT = 300 };
  int ones[COUNT], sums[COUNT];
  void* memory = device_alloc(sizeof ones);
  for (int i = 0; i < COUNT; i++) ones[i] = 1;
  upload(memory, ones, sizeof ones);
  OK(ncclAllReduce(memory, memory, COUNT, ncclInt, ncclSum, communicator, as_cuda(stream)));
  wait_for(stream);
  download(sums, memory, sizeof sums);
  if (sums[0] != ranks || sums[COUNT - 1] != ranks) wrong("a sum", sums[0], ranks);
  device_free(memory);
}

static void await_exactly(atomic_int* counter, int value) {
  while (atomic_load(counter) != value) usleep(200);
}

static ncclComm_t joined(int rank, int round, bool makes_id) {
  if (makes_id) {
    OK(ncclGetUniqueId(&shared->id));
    atomic_store(&shared->has_id, round + 1);
  }
  await(&shared->has_id, round + 1);
  ncclComm_t communicator;
  OK(ncclCommInitRank(&communicator, RANKS, shared->id, rank));
  return communicator;
}

static int entries(const char* folder) {
  DIR* opened = opendir(folder);
  int count = 0;
  while (opened && readdir(opened)) count++;
  if (opened) closedir(opened);
  return count;
}

/* The resources of a process. */
struct holds {
  long long bytes, descriptors, threads;
};

static struct holds held(void) {
  size_t unused = 0, all = 0;
  CUDA(cuMemGetInfo_v2(&unused, &all));
  return (struct holds){(long long)(all - unused), entries("/proc/self/fd"), entries("/proc/self/task")};
}

/* Windlass keeps streams for later communicators, as many as ever lived at a time, and each is a thread of the simulator. A
 * communicator that ends late lives beside the next one, which makes one more thread, once. At least two more rounds follow, so
 * a leak of one a round is seen. */
enum { LATE = 1 };

static bool is_within(struct holds now, struct holds before) {
  /* A communicator takes more than 8 MiB, so a leak of one is seen. */
  return now.bytes <= before.bytes + (8 << 20) && now.descriptors <= before.descriptors && now.threads <= before.threads + LATE;
}

/* Waits up to five seconds: the other ranks may take a moment to release memory. */
static void is_flat(struct holds before) {
  struct holds now = held();
  for (int looks = 0; looks < 500 && !is_within(now, before); looks++) {
    usleep(10000);
    now = held();
  }
  if (now.bytes > before.bytes + (8 << 20)) wrong("device memory in bytes", now.bytes, before.bytes);
  if (now.descriptors > before.descriptors) wrong("open descriptors", now.descriptors, before.descriptors);
  if (now.threads > before.threads + LATE) wrong("threads", now.threads, before.threads);
}

/* A part of the test: what a rank does in a round, before and after the leaver has ended. */
struct part {
  const char* name;
  enum end end;
  /* Rank 0 runs it until it ends; the others run it and wait for `gone` inside. */
  void (*round)(int rank, int round, CUstream stream);
  int rounds;
  bool has_launcher; /* the process that ends is no rank; it makes the id */
};

/* Rank 0 has made the id and hosted the init. The others end their communicator when rank 0 is gone. */
static void maker(int rank, int round, CUstream stream) {
  ncclComm_t communicator = joined(rank, round, rank == 0);
  works(communicator, RANKS, stream);
  if (rank == 0) OK(ncclCommDestroy(communicator));
  atomic_fetch_add(&shared->arrived, 1);
  if (rank == 0) return;
  await(&shared->gone, round + 1);
  OK(ncclCommDestroy(communicator));
}

/* Rank 0 is killed with its communicator alive, and the others abort. With `makes_id` this rank makes the ids. */
static void elastic(int rank, int round, bool makes_id, CUstream stream) {
  ncclComm_t communicator = joined(rank, round, makes_id);
  works(communicator, RANKS, stream);
  atomic_fetch_add(&shared->arrived, 1);
  if (rank == 0) return await(&shared->arrived, RANKS * (round + 1));
  await(&shared->gone, round + 1);
  OK(ncclCommAbort(communicator));
}

static void maker_dies(int rank, int round, CUstream stream) { elastic(rank, round, rank == 0, stream); }
static void other_dies(int rank, int round, CUstream stream) { elastic(rank, round, rank == 1, stream); }

/* Like `other_dies`, but children forked from rank 0 outlive it, as a data loader's workers may. The others have a communicator of
 * their own all the time, in the same memory. */
static ncclComm_t lasting;

static void forker_dies(int rank, int round, CUstream stream) {
  if (rank && !round) {
    if (rank == 1) {
      OK(ncclGetUniqueId(&shared->id));
      atomic_store(&shared->has_id, -1);
    }
    await_exactly(&shared->has_id, -1);
    OK(ncclCommInitRank(&lasting, RANKS - 1, shared->id, rank - 1));
    works(lasting, RANKS - 1, stream);
    atomic_fetch_add(&shared->lasting, 1);
  }
  await(&shared->lasting, RANKS - 1);
  other_dies(rank, round, stream);
  int over = atomic_load(&shared->over);
  if (rank || fork()) return;
  while (atomic_load(&shared->over) == over) usleep(10000);
  _exit(0);
}

/* The process that makes the id is no rank, and ends once all ranks are through their init. */
static void launcher(int rank, int round, CUstream stream) {
  ncclComm_t communicator = joined(rank, round, false);
  atomic_fetch_add(&shared->arrived, 1);
  await(&shared->gone, round + 1);
  works(communicator, RANKS, stream);
  OK(ncclCommDestroy(communicator));
}

/* Rank 0 is in another child than most others, or in none, and ends as soon as its own split has returned. The other rank of its
 * child does nothing more with that child. */
static void split(int rank, int round, int color, CUstream stream) {
  ncclComm_t parent = joined(rank, round, rank == 1), child = NULL;
  works(parent, RANKS, stream);
  OK(ncclCommSplit(parent, color, rank, &child, NULL));
  atomic_fetch_add(&shared->arrived, 1);
  if (rank == 0 && dies) return;
  if (color == 1) {
    int ranks;
    OK(ncclCommCount(child, &ranks));
    works(child, ranks, stream);
    await(&shared->gone, round + 1);
    works(child, ranks, stream);
  }
  OK(ncclCommAbort(parent));
  if (color == 1) OK(ncclCommDestroy(child));
  else if (child) OK(ncclCommAbort(child));
}

static void halves(int rank, int round, CUstream stream) { split(rank, round, rank / 2, stream); }

static void without_color(int rank, int round, CUstream stream) { split(rank, round, rank ? 1 : NCCL_SPLIT_NOCOLOR, stream); }

static const struct part parts[] = {
  {"maker", EXITS, maker, 4, false},
  {"maker_dies", DIES, maker_dies, 12, false},
  {"other_dies", DIES, other_dies, 12, false},
  {"forker_dies", DIES, forker_dies, 8, false},
  {"executes", EXECUTES, other_dies, 8, false},
  {"launcher", EXITS, launcher, 4, true},
  {"without_color", EXITS, without_color, 6, false},
  {"without_color_dies", DIES, without_color, 6, false},
  {"halves", EXITS, halves, 6, false},
  {"halves_die", DIES, halves, 6, false},
};

/* Rounds after which what grows only at first no longer does: caches of events, allocators, threads. */
static int steady_after(int rounds) { return rounds < 20 ? rounds / 2 : 20; }

static void survives(const struct part* part, int rounds) {
  use_device(me);
  CUstream stream = new_stream();
  struct holds before = {0, 0, 0};
  for (int round = 0; round < rounds; round++) {
    part->round(me, round, stream);
    if (round + 1 == steady_after(rounds)) {
      usleep(300000);
      before = held();
    }
  }
  if (lasting) works(lasting, RANKS - 1, stream);
  is_flat(before);
  struct holds now = held();
  fprintf(stderr, "%s rank %d: after %d rounds %lld MiB, %lld descriptors, %lld threads; after %d %lld, %lld, %lld\n", part->name, me,
          steady_after(rounds), before.bytes >> 20, before.descriptors, before.threads, rounds, now.bytes >> 20, now.descriptors, now.threads);
  if (lasting) OK(ncclCommDestroy(lasting));
  exit(0);
}

/* A child process that is killed when this program ends, however it ends. */
static pid_t begun(void) {
  pid_t process = fork();
  if (!process) prctl(PR_SET_PDEATHSIG, SIGKILL);
  return process;
}

/* Pipes whose writing ends close when the leaver executes another program, and when the part is over. */
static int executed[2], held_open[2];

/* Each round the leaver is a new process. */
static void leaves(const struct part* part, int round) {
  if (part->has_launcher) {
    OK(ncclGetUniqueId(&shared->id));
    atomic_store(&shared->has_id, round + 1);
    await(&shared->arrived, RANKS * (round + 1));
    exit(0);
  }
  use_device(0);
  part->round(0, round, new_stream());
  if (dies) raise(SIGKILL);
  if (part->end != EXECUTES) exit(0);
  dup2(held_open[0], STDIN_FILENO);
  execlp("cat", "cat", NULL);
  _exit(1);
}

static int status_of(pid_t process) {
  int status = 0;
  while (waitpid(process, &status, 0) < 0 && errno == EINTR) {}
  return status;
}

static void run(const struct part* part, int rounds) {
  pid_t survivors[RANKS] = {0};
  section_begins(part->name);
  dies = part->end == DIES;
  int over = atomic_load(&shared->over);
  memset(shared, 0, sizeof *shared);
  atomic_store(&shared->over, over);
  for (int rank = part->has_launcher ? 0 : 1; rank < RANKS; rank++) {
    if (!(survivors[rank] = begun())) {
      me = rank;
      survives(part, rounds);
    }
  }
  pid_t executing[ROUNDS_MAX] = {0};
  if (pipe2(held_open, O_CLOEXEC)) exit(3);
  for (int round = 0; round < rounds; round++) {
    if (pipe2(executed, O_CLOEXEC)) exit(3);
    pid_t leaver = begun();
    if (!leaver) leaves(part, round);
    close(executed[1]);
    if (part->end == EXECUTES) {
      char unused;
      EQUAL(read(executed[0], &unused, 1), 0);
      executing[round] = leaver;
    } else {
      int status = status_of(leaver);
      bool is_right = part->end == DIES ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL : status == 0;
      if (!CHECK(is_right)) exit(finish());
    }
    close(executed[0]);
    /* All ranks are past what the leaver's end could have disturbed. */
    await(&shared->arrived, RANKS * (round + 1));
    atomic_store(&shared->gone, round + 1);
  }
  for (int rank = 0; rank < RANKS; rank++) {
    if (survivors[rank]) EQUAL(status_of(survivors[rank]), 0);
  }
  close(held_open[0]);
  close(held_open[1]);
  for (int round = 0; round < rounds; round++) {
    if (executing[round]) EQUAL(status_of(executing[round]), 0);
  }
  atomic_fetch_add(&shared->over, 1);
  EQUAL(atomic_load(&shared->wrong), 0);
  printf("%s: %d rounds\n", part->name, rounds);
  fflush(stdout);
}

int main(int count, char** arguments) {
  begin("leavers", 100);
  if (device_count() < RANKS) skip("four devices are needed");
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  for (size_t index = 0; index < sizeof parts / sizeof *parts; index++) {
    const struct part* part = &parts[index];
    if (count > 1 && strcmp(arguments[1], part->name)) continue;
    run(part, count > 2 ? atoi(arguments[2]) : part->rounds);
  }
  return finish();
}

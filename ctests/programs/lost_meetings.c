/* Holds that a rank whose process ends while ranks meet leaves nobody waiting. Ranks meet after NCCL's init if it did not wait
 * (`blocking = 0`), or if another process made the id. One rank is held: where NCCL's part ends, or while it maps the others'
 * memory. Its process, or one that waits for it, is then killed, calls exit(), is stopped, or forks a child that outlives it. The
 * others end in time, and their memory, descriptors and threads do not grow.
 *
 * Argument: a part; none means all. */
#define _GNU_SOURCE
#include "../support/harness.h"
#include "../support/held.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 3, SURVIVORS = 2, PASSES = 4, WITHIN = 10 };

/* How the process of the held rank ends. The child of LIVES outlives the round, in which everything else goes on. */
enum end { KILLED, EXITS, FORKS, STOPPED, LIVES };

/* Where the rank is held: by a function of the simulated driver that it calls there. */
static const char* const IN_NCCL = "simInitJoined";
static const char* const MAPPING = "cuMemImportFromShareableHandle";

struct part {
  const char* name;
  const char* held_at;
  enum end end;
  int victim;      /* the rank whose process ends: the first, which keeps the roster, or the last */
  bool is_waiting; /* the inits wait, by an id that was made past Windlass */
  bool is_beside;  /* another rank is held, and the victim waits for it */
};

static const struct part parts[] = {
  {"first_is_killed_in_nccl", IN_NCCL, KILLED, 0, false, false},
  {"last_is_killed_in_nccl", IN_NCCL, KILLED, 2, false, false},
  {"first_is_killed_mapping", MAPPING, KILLED, 0, false, false},
  {"last_is_killed_mapping", MAPPING, KILLED, 2, false, false},
  {"first_exits_in_nccl", IN_NCCL, EXITS, 0, false, false},
  {"last_exits_in_nccl", IN_NCCL, EXITS, 2, false, false},
  {"first_exits_mapping", MAPPING, EXITS, 0, false, false},
  {"first_forks_in_nccl", IN_NCCL, FORKS, 0, false, false},
  {"last_forks_in_nccl", IN_NCCL, FORKS, 2, false, false},
  {"first_forks_mapping", MAPPING, FORKS, 0, false, false},
  {"last_forks_mapping", MAPPING, FORKS, 2, false, false},
  {"first_stops_in_nccl", IN_NCCL, STOPPED, 0, false, false},
  {"last_stops_in_nccl", IN_NCCL, STOPPED, 2, false, false},
  {"first_stops_mapping", MAPPING, STOPPED, 0, false, false},
  {"last_stops_mapping", MAPPING, STOPPED, 2, false, false},
  {"first_lives_in_nccl", IN_NCCL, LIVES, 0, false, false},
  {"last_lives_mapping", MAPPING, LIVES, 2, false, false},
  {"waiting_first_is_killed_in_nccl", IN_NCCL, KILLED, 0, true, false},
  {"waiting_last_is_killed_mapping", MAPPING, KILLED, 2, true, false},
  {"waiting_last_exits_in_nccl", IN_NCCL, EXITS, 2, true, false},
  {"waiting_first_forks_mapping", MAPPING, FORKS, 0, true, false},
  {"waiting_last_forks_in_nccl", IN_NCCL, FORKS, 2, true, false},
  {"waiting_first_lives_mapping", MAPPING, LIVES, 0, true, false},
  {"waiting_last_lives_in_nccl", IN_NCCL, LIVES, 2, true, false},
  {"first_is_killed_beside", MAPPING, KILLED, 0, false, true},
  {"last_is_killed_beside", IN_NCCL, KILLED, 2, false, true},
  {"first_exits_beside", IN_NCCL, EXITS, 0, false, true},
  {"last_exits_beside", MAPPING, EXITS, 2, false, true},
  {"last_forks_beside", MAPPING, FORKS, 2, false, true},
  {"waiting_first_exits_beside", MAPPING, EXITS, 0, true, true},
  {"waiting_last_exits_beside", IN_NCCL, EXITS, 2, true, true},
};
enum { PARTS = sizeof parts / sizeof *parts };

/* A part is run in each pass, and is a round then. What its processes tell each other. */
struct round {
  ncclUniqueId id, id_of_two;
  atomic_uint hold; /* 1 while the rank is held; see simHold */
  atomic_int has_id, entered, is_stopped, aborted, gone, has_id_of_two, finished, over;
};
static struct round* round_now;
static struct round (*rounds)[PARTS];
static atomic_int* wrongs;
static const char* now_in = "";

static void wrong(const char* what, long long seen, long long expected) {
  fprintf(stderr, "%s: process %d: %s is %lld, expected %lld\n", now_in, getpid(), what, seen, expected);
  atomic_fetch_add(wrongs, 1);
}

/* Calls by OK are not counted, as killed ranks report no counts. */
#define OK(call) \
  do { \
    ncclResult_t code = (call); \
    if (code) { \
      fprintf(stderr, "%s: %s: %s\n", now_in, #call, ncclGetLastError(NULL)); \
      wrong(#call, code, 0); \
      _exit(3); \
    } \
  } while (0)

static void await(atomic_int* counter, int value) {
  while (atomic_load(counter) < value) usleep(200);
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void check_soon(const char* what, double began) {
  double took = seconds() - began;
  if (took > WITHIN) wrong(what, (long long)took, WITHIN);
}

/* An all-reduce of ones, whose sums are checked. */
static void works(ncclComm_t communicator, int ranks, CUstream stream) {
  enum { COUNT = 300 };
  int ones[COUNT], sums[COUNT];
  void* memory = device_alloc(sizeof ones);
  for (int i = 0; i < COUNT; i++) ones[i] = 1;
  upload(memory, ones, sizeof ones);
  ncclResult_t answer = ncclAllReduce(memory, memory, COUNT, ncclInt, ncclSum, communicator, as_cuda(stream));
  OK(settled(communicator, answer));
  wait_for(stream);
  download(sums, memory, sizeof sums);
  if (sums[0] != ranks || sums[COUNT - 1] != ranks) wrong("a sum", sums[0], ranks);
  device_free(memory);
}

static ncclResult_t begin_init(const struct part* part, ncclComm_t* communicator, int rank) {
  ncclConfig_t configuration = NCCL_CONFIG_INITIALIZER;
  configuration.blocking = part->is_waiting;
  return ncclCommInitRankConfig(communicator, RANKS, round_now->id, rank, &configuration);
}

/* Waits until the communicator is no longer in progress. On the time limit it still is. */
static ncclResult_t settled_within(ncclComm_t communicator, double limit) {
  ncclResult_t state = ncclInProgress;
  for (double began = seconds(); state == ncclInProgress && seconds() - began < limit; usleep(200)) {
    OK(ncclCommGetAsyncError(communicator, &state));
  }
  return state;
}

/* Makes the id past Windlass where inits wait: with an id of Windlass's they would meet before NCCL's part. */
static void make_id(const struct part* part) {
  ncclResult_t (*make)(ncclUniqueId*) = ncclGetUniqueId;
  const char* path = part->is_waiting ? getenv("WINDLASS_NCCL") : NULL;
  if (path) *(void**)&make = dlsym(dlopen(path, RTLD_NOW), "ncclGetUniqueId");
  OK(make(&round_now->id));
}

/* A communicator of the survivors alone, by which each sees that the other goes on. */
static void goes_on(int survivor, CUstream stream) {
  ncclComm_t two = NULL;
  if (!survivor) OK(ncclGetUniqueId(&round_now->id_of_two));
  if (!survivor) atomic_store(&round_now->has_id_of_two, 1);
  await(&round_now->has_id_of_two, 1);
  OK(ncclCommInitRank(&two, SURVIVORS, round_now->id_of_two, survivor));
  works(two, SURVIVORS, stream);
  OK(ncclCommDestroy(two));
}

/* Has the next call of this process to the part's function held. */
static void hold(const struct part* part) {
  CUresult (*sim_hold)(const char*, atomic_uint*) = NULL;
  *(void**)&sim_hold = dlsym(RTLD_DEFAULT, "simHold");
  CUDA(sim_hold(part->held_at, &round_now->hold));
}

static void survive(const struct part* part, int survivor, CUstream stream) {
  int rank = part->victim == 0 ? survivor + 1 : survivor;
  ncclComm_t communicator = NULL;
  if (!survivor) make_id(part);
  if (!survivor) atomic_store(&round_now->has_id, 1);
  await(&round_now->has_id, 1);
  if (part->victim == 0) await(&round_now->entered, 1);
  if (survivor && part->is_beside) hold(part);
  ncclResult_t answer = begin_init(part, &communicator, rank);
  if (part->victim != 0) atomic_fetch_add(&round_now->entered, 1);
  if (part->end == STOPPED) {
    await(&round_now->is_stopped, 1);
    answer = settled_within(communicator, 0.2);
    double began = seconds();
    if (!survivor) {
      OK(ncclCommAbort(communicator));
      check_soon("an abort while a rank is stopped", began);
      communicator = NULL;
    }
    atomic_fetch_add(&round_now->aborted, 1);
  }
  await(&round_now->gone, 1);
  double began = seconds();
  if (answer == ncclInProgress && communicator) answer = settled_within(communicator, WITHIN);
  bool is_right = answer == ncclSuccess || (answer == ncclRemoteError && part->end != LIVES);
  bool is_aborted = part->end == STOPPED && !survivor;
  if (!is_right && !is_aborted) wrong("the state", answer, ncclSuccess);
  if (!is_aborted) fprintf(stderr, "%s: survivor %d: state %d after %.3f s\n", part->name, survivor, answer, seconds() - began);
  check_soon("an init", began);
  if (part->end == LIVES) {
    works(communicator, RANKS, stream);
    OK(ncclCommDestroy(communicator));
  } else if (communicator) {
    OK(ncclCommAbort(communicator));
  }
  check_soon("an abort", began);
  goes_on(survivor, stream);
  atomic_fetch_add(&round_now->finished, 1);
}

static void* end(void* argument) {
  const struct part* part = argument;
  while (atomic_load(&round_now->hold) != 1) usleep(200);
  usleep(30000); /* the others come to where they wait for this one */
  if (part->end == STOPPED) raise(SIGSTOP);
  if (part->end == EXITS) exit(0);
  if ((part->end == FORKS || part->end == LIVES) && fork() == 0) {
    await(&round_now->over, 1);
    _exit(0);
  }
  if (part->end != LIVES) raise(SIGKILL);
  atomic_store(&round_now->hold, 2);
  return NULL;
}

/* The rank that is held; each round it is a new process. */
static void lose(const struct part* part) {
  use_device(part->victim);
  CUstream stream = new_stream();
  if (!part->is_beside) hold(part);
  await(&round_now->has_id, 1);
  pthread_t ender;
  ncclComm_t communicator = NULL;
  if (part->is_waiting && part->victim == 0) atomic_store(&round_now->entered, 1);
  if (part->victim != 0 && !part->is_waiting) await(&round_now->entered, SURVIVORS);
  if (pthread_create(&ender, NULL, end, (void*)part)) abort();
  ncclResult_t answer = begin_init(part, &communicator, part->victim);
  if (part->victim == 0) atomic_store(&round_now->entered, 1);
  pthread_join(ender, NULL);
  OK(answer == ncclInProgress ? settled_within(communicator, WITHIN) : answer);
  atomic_store(&round_now->gone, 1);
  works(communicator, RANKS, stream);
  OK(ncclCommDestroy(communicator));
  exit(0);
}

/* A child process that is killed when this program ends, however it ends. */
static pid_t begun(void) {
  pid_t process = fork();
  if (!process) prctl(PR_SET_PDEATHSIG, SIGKILL);
  return process;
}

static int status_of(pid_t process, int options) {
  int status = 0;
  while (waitpid(process, &status, options) < 0 && errno == EINTR) {}
  return status;
}

/* Whether the process that ended by exit() left its counters. */
static void left_no_file(pid_t process) {
  char middle[32];
  snprintf(middle, sizeof middle, "-%d-", process);
  DIR* opened = opendir("/dev/shm");
  for (struct dirent* one; opened && (one = readdir(opened));) {
    if (!strncmp(one->d_name, "windlass-", 9) && strstr(one->d_name, middle)) CHECK(!"a file is left");
  }
  if (opened) closedir(opened);
}

/* The process of the held rank ends as the part says, and the survivors hear of it. */
static void watch(const struct part* part, pid_t victim) {
  if (part->end == LIVES) {
    EQUAL(status_of(victim, 0), 0);
    return;
  }
  double began = seconds();
  if (part->end == STOPPED) {
    CHECK(WIFSTOPPED(status_of(victim, WUNTRACED)));
    atomic_store(&round_now->is_stopped, 1);
    await(&round_now->aborted, SURVIVORS);
    kill(victim, SIGKILL);
  }
  if (part->end == EXITS) {
    while (atomic_load(&round_now->hold) != 1) usleep(200);
    began = seconds();
  }
  int status = status_of(victim, 0);
  CHECK(part->end == EXITS ? status == 0 : WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  if (part->end == EXITS) left_no_file(victim);
  CHECK(seconds() - began < WITHIN);
  fprintf(stderr, "%s: the process ended after %.3f s\n", part->name, seconds() - began);
  atomic_store(&round_now->hold, 2);
  atomic_store(&round_now->gone, 1);
}

/* The root of an id is a thread of its maker and a socket, which may still be there. On a busy machine an init may
 * find launch resources of an aborted communicator still in use, and make more of them, with a stream, whose thread then stays: two were
 * seen. At least three passes follow, so a leak of one a pass is seen. A communicator takes more than 8 MiB. */
static const struct held ROOM = {.descriptors = 1, .threads = 2, .mappings = 1 << 20, .device_bytes = 8 << 20};

/* An exit waits five seconds for a thread that does not come out of the driver: once is enough. */
static bool is_run(const struct part* part, int pass, const char* chosen) {
  bool is_long = part->end == EXITS && part->held_at == MAPPING && !part->is_beside;
  return !(pass && is_long) && (!chosen || strstr(part->name, chosen));
}

static void survive_all(int survivor, const char* chosen) {
  struct held before = {0};
  for (int pass = 0; pass < PASSES; pass++) {
    for (int index = 0; index < PARTS; index++) {
      const struct part* part = &parts[index];
      if (!is_run(part, pass, chosen)) continue;
      now_in = part->name;
      round_now = &rounds[pass][index];
      /* A rank has the same device in each round of a part. */
      use_device(part->victim == 0 ? survivor + 1 : survivor);
      CUstream stream = new_stream();
      survive(part, survivor, stream);
      CUDA(cuStreamDestroy_v2(stream));
    }
    if (!pass) usleep(300000), before = held_now();
  }
  if (!held_again(&before, &ROOM)) wrong("a survivor that holds more", 1, 0);
  exit(0);
}

int main(int count, char** arguments) {
  begin("lost_meetings", 200);
  if (device_count() < RANKS) skip("three devices are needed");
  const char* chosen = count > 1 ? arguments[1] : NULL;
  rounds = mmap(NULL, PASSES * sizeof *rounds + sizeof *wrongs, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if ((void*)rounds == MAP_FAILED) return STATUS_FAILED;
  wrongs = (atomic_int*)(rounds + PASSES);
  pid_t survivors[SURVIVORS];
  for (int survivor = 0; survivor < SURVIVORS; survivor++) {
    if (!(survivors[survivor] = begun())) survive_all(survivor, chosen);
  }
  for (int pass = 0; pass < PASSES; pass++) {
    for (int index = 0; index < PARTS; index++) {
      const struct part* part = &parts[index];
      if (!is_run(part, pass, chosen)) continue;
      now_in = part->name;
      section_begins(part->name);
      round_now = &rounds[pass][index];
      pid_t victim = begun();
      if (!victim) lose(part);
      watch(part, victim);
      /* The child of a rank that forked goes on until the others are through. */
      await(&round_now->finished, SURVIVORS);
      atomic_store(&round_now->over, 1);
      if (!pass) printf("%s\n", part->name), fflush(stdout);
    }
  }
  for (int survivor = 0; survivor < SURVIVORS; survivor++) EQUAL(status_of(survivors[survivor], 0), 0);
  EQUAL(atomic_load(wrongs), 0);
  return finish();
}

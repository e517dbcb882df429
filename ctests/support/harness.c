/* The harness: see harness.h for what each function does. */
#define _GNU_SOURCE
#include "harness.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { FUNCTIONS_MAX = 128, NAME_BYTES = 48 };

/* Shared by the ranks, be they threads or processes: mapped before the first of them starts. */
struct board {
  atomic_int checks, failures;
  pthread_mutex_t mutex; /* protects the calls and, with `moved`, the barrier */
  pthread_cond_t moved;
  int barrier_size, arrived;
  unsigned barrier; /* how many barriers are over */
  struct { char name[NAME_BYTES]; long long count; } calls[FUNCTIONS_MAX];
  ncclUniqueId ids[SLOTS_MAX];
  uint64_t digests[RANKS_MAX];
  /* The part that each rank is in: a string constant, at the same address in all processes. */
  _Atomic(const char*) parts[RANKS_MAX];
};

static struct board* board;
static const char* program = "test";
static const char* section = "the beginning";
static int word_count; /* the arguments of the program, with its name */
static char** words;
static pid_t starter;
static pid_t children[RANKS_MAX];

static void end_children(void) {
  for (int rank = 0; rank < RANKS_MAX; rank++) {
    if (children[rank] > 0) kill(children[rank], SIGKILL);
  }
}

/* Only calls that a signal handler may make. */
static void write_error(const char* text) {
  ssize_t written = write(STDERR_FILENO, text, strlen(text));
  (void)written;
}

static void out_of_time(int signal_number) {
  (void)signal_number;
  write_error("time limit reached in ");
  write_error(section);
  for (int rank = 0; rank < RANKS_MAX; rank++) {
    const char* part = atomic_load(&board->parts[rank]);
    if (!part) continue;
    char number[] = {'\n', 'r', 'a', 'n', 'k', ' ', (char)('0' + rank), ':', ' ', 0};
    write_error(number);
    write_error(part);
  }
  write_error("\n");
  if (getpid() == starter) end_children();
  _exit(STATUS_FAILED);
}

/* Prints in which library, and at which offset, the program crashed. Its calls may allocate, but the process is lost anyway. */
static void crashed(int signal_number) {
  void* addresses[64];
  int count = backtrace(addresses, 64);
  signal(signal_number, SIG_DFL);
  backtrace_symbols_fd(addresses, count, STDERR_FILENO);
  raise(signal_number);
}

/* A run that loads another library than it should proves nothing. CTESTS_NCCL names the right one. */
static void check_library(void) {
  const char* meant = getenv("CTESTS_NCCL");
  Dl_info info = {0};
  char wanted[PATH_MAX], seen[PATH_MAX];
  if (!meant) return;
  void* address = dlsym(RTLD_DEFAULT, "ncclGetVersion");
  if (!address || !dladdr(address, &info) || !realpath(info.dli_fname, seen) || !realpath(meant, wanted) ||
      strcmp(seen, wanted)) {
    fprintf(stderr, "%s: NCCL is %s, not %s\n", program, info.dli_fname ? info.dli_fname : "nowhere", meant);
    exit(STATUS_FAILED);
  }
}

void begin(const char* name, int seconds) {
  program = name;
  starter = getpid();
  board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (board == MAP_FAILED) {
    perror("mmap");
    exit(STATUS_FAILED);
  }
  pthread_mutexattr_t mutex_attributes;
  pthread_mutexattr_init(&mutex_attributes);
  pthread_mutexattr_setpshared(&mutex_attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutex_init(&board->mutex, &mutex_attributes);
  pthread_condattr_t condition_attributes;
  pthread_condattr_init(&condition_attributes);
  pthread_condattr_setpshared(&condition_attributes, PTHREAD_PROCESS_SHARED);
  pthread_cond_init(&board->moved, &condition_attributes);
  check_library();
  signal(SIGALRM, out_of_time);
  signal(SIGSEGV, crashed);
  signal(SIGABRT, crashed);
  signal(SIGBUS, crashed);
  const char* limit = getenv("CTESTS_TIMEOUT_S");
  alarm((unsigned)(limit ? atoi(limit) : seconds));
}

static int by_name(const void* left, const void* right) { return strcmp(left, right); }

static void write_calls(void) {
  const char* path = getenv("CTESTS_CALLS");
  if (!path) return;
  FILE* file = fopen(path, "w");
  if (!file) {
    perror(path);
    atomic_fetch_add(&board->failures, 1);
    return;
  }
  int used = 0;
  while (used < FUNCTIONS_MAX && board->calls[used].name[0]) used++;
  qsort(board->calls, (size_t)used, sizeof board->calls[0], by_name);
  for (int i = 0; i < used; i++) fprintf(file, "%s %lld\n", board->calls[i].name, board->calls[i].count);
  fclose(file);
}

int finish(void) {
  write_calls();
  int checks = atomic_load(&board->checks), failures = atomic_load(&board->failures);
  printf("%s: %d checks, %d failed\n", program, checks, failures);
  if (checks == 0) fprintf(stderr, "%s: nothing was checked\n", program);
  fflush(stdout);
  return failures || !checks ? STATUS_FAILED : STATUS_PASSED;
}

void skip(const char* reason) {
  printf("%s: skipped: %s\n", program, reason);
  fflush(stdout);
  _exit(STATUS_SKIPPED);
}

/* Devices are counted in a child, so that processes forked later start without CUDA in them. */
int device_count(void) {
  int ends[2];
  if (pipe(ends)) return 0;
  pid_t child = fork();
  if (child == 0) {
    int count = 0;
    if (cuInit(0) != CUDA_SUCCESS || cuDeviceGetCount(&count) != CUDA_SUCCESS) count = 0;
    ssize_t written = write(ends[1], &count, sizeof count);
    _exit(written == sizeof count ? 0 : 1);
  }
  close(ends[1]);
  int count = 0;
  if (read(ends[0], &count, sizeof count) != sizeof count) count = 0;
  close(ends[0]);
  waitpid(child, NULL, 0);
  return count;
}

int rank_count(int usual) {
  int devices = device_count();
  const char* wanted = getenv("CTESTS_RANKS");
  int ranks = wanted ? atoi(wanted) : usual;
  if (wanted && (ranks > RANKS_MAX || ranks > devices)) {
    fprintf(stderr, "%s: CTESTS_RANKS is %s; there are %d devices, and at most %d ranks\n", program, wanted, devices, RANKS_MAX);
    exit(STATUS_FAILED);
  }
  if (ranks > RANKS_MAX) ranks = RANKS_MAX;
  if (ranks > devices) ranks = devices;
  /* An average over three ranks is exact in no format, and two ranks test as much as the odd number. */
  if (!wanted && ranks == 3) ranks = 2;
  if (ranks < 2) skip("fewer than two devices");
  return ranks;
}

bool on_gpus(void) {
  const char* machine = getenv("CTESTS_MACHINE");
  return machine && strcmp(machine, "gpu") == 0;
}

bool is_wanted(int count, char** arguments, const char* part) {
  for (int i = 1; i < count; i++) {
    if (strcmp(arguments[i], part) == 0) return true;
  }
  return count < 2;
}

static bool is_one_of(const char* word, const char* const* list) {
  while (*list && strcmp(word, *list)) list++;
  return *list;
}

static bool is_named(const char* name) {
  for (int i = 1; i < word_count; i++) {
    if (strcmp(words[i], name) == 0) return true;
  }
  return false;
}

void choose(int count, char** arguments) {
  word_count = count;
  words = arguments;
}

static const char* const SECTIONS[] = {"processes", "threads", "in_turn", "one_thread", "faults", NULL};
static const char* const SECTIONS_OF_PARTS[] = {"processes", "threads", NULL};

bool is_section_chosen(const char* name) {
  int sections = 0;
  for (int i = 1; i < word_count; i++) sections += is_one_of(words[i], SECTIONS);
  if (sections) return is_named(name);
  return word_count < 2 ? strcmp(name, "faults") != 0 : is_one_of(name, SECTIONS_OF_PARTS);
}

static bool is_part_chosen(const char* name) {
  int parts = 0;
  for (int i = 1; i < word_count; i++) parts += !is_one_of(words[i], SECTIONS);
  return !parts || is_named(name);
}

bool part_begins(struct rank* self, const char* part) {
  if (!is_part_chosen(part)) return false;
  atomic_store(&board->parts[self->rank], part);
  return true;
}

/* Other ranks' lines are printed at the section's end. Here their order would be random, and waiting for them would hide errors
 * of a rank that runs ahead. */
void part_ends(struct rank* self) {
  const char* part = atomic_exchange(&board->parts[self->rank], NULL);
  if (self->rank != 0) return;
  printf("%s %s rank 0 digest %016llx\n", section, part, (unsigned long long)self->digest);
  fflush(stdout);
}

void section_begins(const char* name) {
  section = name;
  for (int rank = 0; rank < RANKS_MAX; rank++) atomic_store(&board->parts[rank], NULL);
}

CUcontext use_device(int ordinal) {
  CUdevice device;
  CUcontext context;
  CUDA(cuInit(0));
  CUDA(cuDeviceGet(&device, ordinal));
  CUDA(cuDevicePrimaryCtxRetain(&context, device));
  CUDA(cuCtxSetCurrent(context));
  return context;
}

struct start { struct rank rank; void (*body)(struct rank*); };

/* The ordinal of a rank's own device. If one GPU is shown as several (one_gpu.c), every process has its own as the first. */
static int device_of(int rank) {
  if (!getenv("CTESTS_ONE_GPU")) return rank;
  char ordinal[] = {(char)('0' + rank), 0};
  setenv("ONE_GPU_ORDINAL", ordinal, 1);
  return 0;
}

static void* run_rank(void* argument) {
  struct start* start = argument;
  struct rank* self = &start->rank;
  self->digest = digest_of(0, NULL, 0);
  self->device = device_of(self->rank);
  self->context = use_device(self->device);
  self->stream = new_stream();
  start->body(self);
  wait_for(self->stream);
  CUDA(cuStreamDestroy_v2(self->stream));
  board->digests[self->rank] = self->digest;
  return NULL;
}

static void run_threads(struct start* starts, int ranks) {
  pthread_t threads[RANKS_MAX];
  for (int rank = 0; rank < ranks; rank++) {
    if (pthread_create(&threads[rank], NULL, run_rank, &starts[rank])) abort();
  }
  for (int rank = 0; rank < ranks; rank++) pthread_join(threads[rank], NULL);
}

/* Moves this process to its rank's host. Hosts are network namespaces, given by their files, separated by colons. Each has
 * consecutive ranks, as many as every other. */
static void enter_host(int rank, int ranks) {
  const char* given = getenv("CTESTS_HOSTS");
  if (!given) return;
  char names[512], *rest = NULL;
  int hosts = 1;
  snprintf(names, sizeof names, "%s", given);
  for (const char* at = names; *at; at++) hosts += *at == ':';
  char* name = strtok_r(names, ":", &rest);
  for (int host = rank * hosts / ranks; host > 0; host--) name = strtok_r(NULL, ":", &rest);
  int host = open(name, O_RDONLY | O_CLOEXEC);
  if (host < 0 || setns(host, CLONE_NEWNET)) abort();
  close(host);
  setenv("NCCL_HOSTID", name, 1); /* NCCL tells hosts apart by it */
}

static void run_processes(struct start* starts, int ranks) {
  fflush(NULL);
  for (int rank = 0; rank < ranks; rank++) {
    children[rank] = fork();
    if (children[rank] < 0) abort();
    if (children[rank] == 0) {
      memset(children, 0, sizeof children);
      enter_host(rank, ranks);
      run_rank(&starts[rank]);
      exit(0); /* not _exit: libraries write their reports at exit */
    }
  }
  for (int ended = 0; ended < ranks; ended++) {
    int status;
    pid_t child = wait(&status);
    for (int rank = 0; rank < ranks; rank++) {
      if (children[rank] != child) continue;
      children[rank] = 0;
      if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
      fprintf(stderr, "%s: rank %d ended with %s %d\n", program, rank, WIFEXITED(status) ? "status" : "signal",
              WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
      atomic_fetch_add(&board->failures, 1);
      end_children(); /* else they would wait for the dead one for ever */
    }
  }
}

void run_ranks(const char* name, enum rank_kind kind, int ranks, void (*body)(struct rank*), void* argument) {
  struct start starts[RANKS_MAX];
  if (kind == THREADS && getenv("CTESTS_ONE_GPU")) return; /* on one shared GPU a process has one device */
  memset(starts, 0, sizeof starts);
  section_begins(name);
  board->barrier_size = ranks;
  board->arrived = 0;
  for (int rank = 0; rank < ranks; rank++) {
    starts[rank].rank.rank = rank;
    starts[rank].rank.ranks = ranks;
    starts[rank].rank.kind = kind;
    starts[rank].rank.argument = argument;
    starts[rank].body = body;
  }
  (kind == THREADS ? run_threads : run_processes)(starts, ranks);
  if (atomic_load(&board->failures)) exit(finish());
  for (int rank = 0; rank < ranks; rank++) {
    printf("%s rank %d of %d digest %016llx\n", name, rank, ranks, (unsigned long long)board->digests[rank]);
  }
  fflush(stdout);
}

static bool is_asleep(pid_t thread) {
  char name[64], words[512] = "";
  snprintf(name, sizeof name, "/proc/self/task/%d/stat", (int)thread);
  FILE* file = fopen(name, "r");
  if (!file) return false;
  size_t count = fread(words, 1, sizeof words - 1, file);
  fclose(file);
  words[count] = 0;
  const char* state = strrchr(words, ')');
  return state && state[1] && state[2] == 'S';
}

void await_sleep(pid_t thread) {
  for (int asleep = 0; asleep < 30; usleep(10000)) asleep = is_asleep(thread) ? asleep + 1 : 0;
}

void meet(struct rank* self) {
  (void)self;
  pthread_mutex_lock(&board->mutex);
  unsigned barrier = board->barrier;
  if (++board->arrived == board->barrier_size) {
    board->arrived = 0;
    board->barrier++;
    pthread_cond_broadcast(&board->moved);
  }
  while (board->barrier == barrier) pthread_cond_wait(&board->moved, &board->mutex);
  pthread_mutex_unlock(&board->mutex);
}

void together(struct rank* self) {
  if (self->kind == THREADS && on_gpus()) meet(self);
}

static ncclUniqueId shared_id(struct rank* self, int slot) {
  meet(self);
  ncclUniqueId id = board->ids[slot];
  meet(self);
  return id;
}

ncclUniqueId share_id(struct rank* self, int slot, int maker) {
  if (self->rank == maker) NCCL(ncclGetUniqueId(&board->ids[slot]));
  return shared_id(self, slot);
}

ncclUniqueId share_foreign_id(struct rank* self, int slot, int maker) {
  ncclResult_t (*make)(ncclUniqueId*) = NULL;
  const char* path = getenv("WINDLASS_NCCL");
  *(void**)&make = dlsym(path ? dlopen(path, RTLD_NOW) : RTLD_DEFAULT, "ncclGetUniqueId");
  if (self->rank == maker) EQUAL(make(&board->ids[slot]), ncclSuccess);
  return shared_id(self, slot);
}

ncclComm_t world(struct rank* self, int slot) {
  ncclComm_t communicator = NULL;
  ncclUniqueId id = share_id(self, slot, 0);
  const char* blocking = getenv("CTESTS_BLOCKING");
  if (!blocking) {
    NCCL(ncclCommInitRank(&communicator, self->ranks, id, self->rank));
    return communicator;
  }
  ncclConfig_t configuration = NCCL_CONFIG_INITIALIZER;
  configuration.blocking = atoi(blocking);
  count_calls("ncclCommInitRankConfig", 1);
  ncclResult_t answer = ncclCommInitRankConfig(&communicator, self->ranks, id, self->rank, &configuration);
  EQUAL(settled(communicator, answer), ncclSuccess);
  return communicator;
}

ncclResult_t settled(ncclComm_t communicator, ncclResult_t answer) {
  while (answer == ncclInProgress) {
    /* The number of polls varies, so no check counts them. */
    count_calls("ncclCommGetAsyncError", 1);
    if (ncclCommGetAsyncError(communicator, &answer) != ncclSuccess) return ncclInternalError;
    sched_yield();
  }
  return answer;
}

void destroy_each(ncclComm_t* communicators, int count) {
  if (on_gpus()) NCCL(ncclGroupStart());
  for (int i = 0; i < count; i++) NCCL(ncclCommDestroy(communicators[i]));
  if (on_gpus()) NCCL(ncclGroupEnd());
}

void count_calls(const char* function, int calls) {
  pthread_mutex_lock(&board->mutex);
  for (int i = 0; i < FUNCTIONS_MAX; i++) {
    if (!board->calls[i].name[0]) snprintf(board->calls[i].name, NAME_BYTES, "%s", function);
    if (strcmp(board->calls[i].name, function)) continue;
    board->calls[i].count += calls;
    break;
  }
  pthread_mutex_unlock(&board->mutex);
}

/* Counts the call written as `text`, for instance "ncclCommCount(communicator, &count)". A pnccl name counts as the nccl one. */
static void count_call(const char* text) {
  if (text[0] == 'p') text++;
  char name[NAME_BYTES];
  size_t length = strcspn(text, "(");
  if (length >= sizeof name || strncmp(text, "nccl", 4)) return;
  memcpy(name, text, length);
  name[length] = 0;
  count_calls(name, 1);
}

static bool judge(bool holds) {
  atomic_fetch_add(&board->checks, 1);
  if (!holds) atomic_fetch_add(&board->failures, 1);
  return holds;
}

bool check_that(bool holds, const char* text, const char* file, int line) {
  if (!judge(holds)) fprintf(stderr, "%s:%d: %s does not hold\n", file, line, text);
  return holds;
}

bool check_equal(long long left, long long right, const char* text, const char* file, int line) {
  if (!judge(left == right)) fprintf(stderr, "%s:%d: %s does not hold: %lld, %lld\n", file, line, text, left, right);
  return left == right;
}

bool check_code(ncclResult_t seen, ncclResult_t wanted, const char* call, const char* file, int line) {
  count_call(call);
  if (judge(seen == wanted)) return true;
  fprintf(stderr, "%s:%d: %s answered %d, not %d\n", file, line, call, (int)seen, (int)wanted);
  return false;
}

void require_nccl(ncclResult_t seen, const char* call, const char* file, int line) {
  count_call(call);
  if (judge(seen == ncclSuccess)) return;
  fprintf(stderr, "%s:%d: %s answered %d: %s\n", file, line, call, (int)seen, ncclGetLastError(NULL));
  _exit(STATUS_FAILED);
}

void require_cuda(CUresult seen, const char* call, const char* file, int line) {
  if (seen == CUDA_SUCCESS) return;
  atomic_fetch_add(&board->failures, 1);
  fprintf(stderr, "%s:%d: %s answered %d\n", file, line, call, seen);
  _exit(STATUS_FAILED);
}

uint64_t program_seed(uint64_t otherwise) {
  const char* text = getenv("CTESTS_SEED");
  uint64_t seed = text ? strtoull(text, NULL, 0) : otherwise;
  fprintf(stderr, "%s: seed %llu (CTESTS_SEED sets it)\n", program, (unsigned long long)seed);
  return seed;
}

struct random random_from(uint64_t seed) { return (struct random){seed}; }

/* The splitmix64 sequence. */
uint64_t random_next(struct random* random) {
  uint64_t mixed = random->state += 0x9e3779b97f4a7c15u;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
  return mixed ^ (mixed >> 31);
}

uint64_t random_below(struct random* random, uint64_t below) { return random_next(random) % below; }

/* FNV-1a over 64 bits. */
uint64_t digest_of(uint64_t digest, const void* bytes, size_t count) {
  const unsigned char* byte = bytes;
  if (!digest) digest = 0xcbf29ce484222325u;
  for (size_t i = 0; i < count; i++) digest = (digest ^ byte[i]) * 0x100000001b3u;
  return digest;
}

void record(struct rank* self, const void* bytes, size_t count) {
  self->digest = digest_of(self->digest, bytes, count);
}

void* device_alloc(size_t bytes) {
  CUdeviceptr pointer = 0;
  CUDA(cuMemAlloc_v2(&pointer, bytes ? bytes : 1));
  return (void*)(uintptr_t)pointer;
}

void device_free(void* pointer) { CUDA(cuMemFree_v2((CUdeviceptr)(uintptr_t)pointer)); }

void device_fill(void* pointer, unsigned char value, size_t bytes) {
  if (bytes) CUDA(cuMemsetD8_v2((CUdeviceptr)(uintptr_t)pointer, value, bytes));
  CUDA(cuCtxSynchronize()); /* a memset may not have finished when it returns */
}

void upload(void* device, const void* host, size_t bytes) {
  if (bytes) CUDA(cuMemcpyHtoD_v2((CUdeviceptr)(uintptr_t)device, host, bytes));
  /* From pageable memory the copy's last bytes may still be in flight when it returns, and these streams do not order themselves
   * with others. */
  CUDA(cuCtxSynchronize());
}

void download(void* host, const void* device, size_t bytes) {
  if (bytes) CUDA(cuMemcpyDtoH_v2(host, (CUdeviceptr)(uintptr_t)device, bytes));
}

CUstream new_stream(void) {
  CUstream stream = NULL;
  CUDA(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  return stream;
}

void wait_for(CUstream stream) { CUDA(cuStreamSynchronize(stream)); }

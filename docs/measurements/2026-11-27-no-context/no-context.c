/* Which device NCCL takes where it makes a communicator on a thread that has no current CUDA context, and what it leaves current.
 *
 *     gcc -std=gnu11 -Wall -Wextra no-context.c -o no-context -ldl -lpthread
 *     ./no-context LIBCUDA LIBNCCL [LIBCUDART]
 *
 * Each line is a forked process: the steps that it took, then a communicator of one rank. LIBCUDART is a copy of CUDA's runtime
 * that is not NCCL's, as a program has it; without it the cases that need one are left out, as are those with functions that the
 * release lacks. Two GPUs are enough. Columns:
 *
 *   before     device of the thread's current context before NCCL's call
 *   result     of NCCL's call
 *   device     ncclCommCuDevice; for ncclMemAlloc the pointer's device
 *   after      device of the current context after the call
 *   destroyed  the same after ncclCommDestroy, or ncclMemFree
 *   active     devices whose primary context is active after the call; ":N" are its flags, where there are any
 *
 * "none" says that no context is current, "eN" that the driver answers with error N. A step that failed has a line above its case. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { COMPUTE_MODE = 20, POINTER_DEVICE_ORDINAL = 9, FLOAT = 7, SUM = 0 };
enum { BYTES = 4096, DEVICES = 16, AT_ONCE = 8, LIMIT = 60, LACKED = -2 };

typedef struct { char bytes[128]; } Id;

static struct {
  int (*cuInit)(unsigned);
  int (*cuDriverGetVersion)(int*);
  int (*cuDeviceGetCount)(int*);
  int (*cuDeviceGetName)(char*, int, int);
  int (*cuDeviceGetAttribute)(int*, int, int);
  int (*cuDevicePrimaryCtxRetain)(void**, int);
  int (*cuDevicePrimaryCtxReset_v2)(int);
  int (*cuDevicePrimaryCtxGetState)(int, unsigned*, int*);
  int (*cuCtxCreate_v2)(void**, unsigned, int);
  int (*cuCtxDestroy_v2)(void*);
  int (*cuCtxPushCurrent_v2)(void*);
  int (*cuCtxPopCurrent_v2)(void**);
  int (*cuCtxSetCurrent)(void*);
  int (*cuCtxGetCurrent)(void**);
  int (*cuCtxGetDevice)(int*);
  int (*cuMemAlloc_v2)(unsigned long long*, size_t);
  int (*cuStreamCreate)(void**, unsigned);
  int (*cuPointerGetAttribute)(void*, int, unsigned long long);
} driver;

static struct {
  int (*ncclGetVersion)(int*);
  int (*ncclGetUniqueId)(Id*);
  int (*ncclCommInitRank)(void**, int, Id, int);
  int (*ncclCommInitRankConfig)(void**, int, Id, int, void*);
  int (*ncclCommInitRankScalable)(void**, int, int, int, Id*, void*); /* 2.23 */
  int (*ncclCommInitAll)(void**, int, const int*);
  int (*ncclCommSplit)(void*, int, int, void**, void*);
  int (*ncclCommDestroy)(void*);
  int (*ncclCommAbort)(void*);
  int (*ncclCommCuDevice)(void*, int*);
  int (*ncclCommRegister)(void*, void*, size_t, void**); /* 2.19 */
  int (*ncclAllReduce)(const void*, void*, size_t, int, int, void*, void*);
  int (*ncclGroupStart)(void);
  int (*ncclGroupEnd)(void);
  int (*ncclMemAlloc)(void**, size_t); /* 2.19 */
  int (*ncclMemFree)(void*);
} nccl;

static struct {
  int (*cudaRuntimeGetVersion)(int*);
  int (*cudaGetDeviceCount)(int*);
  int (*cudaSetDevice)(int);
  int (*cudaDeviceReset)(void);
} runtime;

static const char *driver_path, *nccl_path, *runtime_path;

static void* library(const char* path) {
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!handle) fprintf(stderr, "%s\n", dlerror()), exit(2);
  return handle;
}

/* A function that NCCL's release lacks stays NULL: cases with it are left out. */
static void* function(void* handle, const char* name) {
  void* found = dlsym(handle, name);
  if (!found && strncmp(name, "nccl", 4)) fprintf(stderr, "%s\n", dlerror()), exit(2);
  return found;
}

#define FIND(table, handle, name) table.name = (__typeof__(table.name))function(handle, #name)

static void load(void) {
  void* handle = library(driver_path);
  FIND(driver, handle, cuInit), FIND(driver, handle, cuDriverGetVersion), FIND(driver, handle, cuDeviceGetCount);
  FIND(driver, handle, cuDeviceGetName), FIND(driver, handle, cuDeviceGetAttribute);
  FIND(driver, handle, cuDevicePrimaryCtxRetain), FIND(driver, handle, cuDevicePrimaryCtxReset_v2);
  FIND(driver, handle, cuDevicePrimaryCtxGetState), FIND(driver, handle, cuCtxCreate_v2), FIND(driver, handle, cuCtxDestroy_v2);
  FIND(driver, handle, cuCtxPushCurrent_v2), FIND(driver, handle, cuCtxPopCurrent_v2), FIND(driver, handle, cuCtxSetCurrent);
  FIND(driver, handle, cuCtxGetCurrent), FIND(driver, handle, cuCtxGetDevice), FIND(driver, handle, cuMemAlloc_v2);
  FIND(driver, handle, cuStreamCreate), FIND(driver, handle, cuPointerGetAttribute);
  handle = library(nccl_path);
  FIND(nccl, handle, ncclGetVersion), FIND(nccl, handle, ncclGetUniqueId), FIND(nccl, handle, ncclCommInitRank);
  FIND(nccl, handle, ncclCommInitRankConfig), FIND(nccl, handle, ncclCommInitRankScalable), FIND(nccl, handle, ncclCommInitAll);
  FIND(nccl, handle, ncclCommSplit), FIND(nccl, handle, ncclCommDestroy), FIND(nccl, handle, ncclCommAbort);
  FIND(nccl, handle, ncclCommCuDevice), FIND(nccl, handle, ncclCommRegister), FIND(nccl, handle, ncclAllReduce);
  FIND(nccl, handle, ncclGroupStart), FIND(nccl, handle, ncclGroupEnd), FIND(nccl, handle, ncclMemAlloc);
  FIND(nccl, handle, ncclMemFree);
  if (!runtime_path) return;
  handle = library(runtime_path);
  FIND(runtime, handle, cudaRuntimeGetVersion), FIND(runtime, handle, cudaGetDeviceCount);
  FIND(runtime, handle, cudaSetDevice), FIND(runtime, handle, cudaDeviceReset);
}

/* The steps. Each answers with the first error, or 0. */

static void *comm, *stream;
static unsigned long long buffer;

static int cu_init(void) { return driver.cuInit(0); }
static int push_1(void) {
  void* context;
  int code = driver.cuInit(0);
  if (!code) code = driver.cuDevicePrimaryCtxRetain(&context, 1);
  return code ? code : driver.cuCtxPushCurrent_v2(context);
}
static int pop(void) {
  void* context;
  return driver.cuCtxPopCurrent_v2(&context);
}
static int none(void) { return driver.cuCtxSetCurrent(NULL); }
static int reset_1(void) { return driver.cuDevicePrimaryCtxReset_v2(1); }
static int create_1(void) {
  void* context;
  int code = driver.cuInit(0);
  return code ? code : driver.cuCtxCreate_v2(&context, 0, 1);
}
static void* destroy_context(void* context) { return (void*)(long)driver.cuCtxDestroy_v2(context); }
static int destroy_elsewhere(void) {
  void *context, *code;
  pthread_t thread;
  if (driver.cuCtxGetCurrent(&context)) return -1;
  pthread_create(&thread, NULL, destroy_context, context);
  pthread_join(thread, &code);
  return (int)(long)code;
}
static int visible_1(void) { return setenv("CUDA_VISIBLE_DEVICES", "1", 1); }
static int runtime_count(void) {
  int count;
  return runtime.cudaGetDeviceCount(&count);
}
static int runtime_0(void) { return runtime.cudaSetDevice(0); }
static int runtime_1(void) { return runtime.cudaSetDevice(1); }
static int runtime_reset(void) { return runtime.cudaDeviceReset(); }

static int make(void** made) {
  Id id;
  int code = nccl.ncclGetUniqueId(&id);
  return code ? code : nccl.ncclCommInitRank(made, 1, id, 0);
}
static int nccl_init(void) {
  int code = make(&comm);
  if (!code) code = driver.cuMemAlloc_v2(&buffer, 2 * BYTES);
  return code ? code : driver.cuStreamCreate(&stream, 1);
}
static int nccl_all_1(void) {
  int device = 1;
  return nccl.ncclCommInitAll(&comm, 1, &device);
}
static int nccl_split(void) {
  void* child;
  return nccl.ncclCommSplit(comm, 0, 0, &child, NULL);
}
static int nccl_all_reduce(void) {
  char* from = (char*)buffer;
  return nccl.ncclAllReduce(from, from + BYTES, BYTES / 4, FLOAT, SUM, comm, stream);
}
static int nccl_group(void) {
  int code = nccl.ncclGroupStart();
  if (!code) code = nccl_all_reduce();
  int end = nccl.ncclGroupEnd();
  return code ? code : end;
}
static int nccl_register(void) {
  void* handle;
  return nccl.ncclCommRegister ? nccl.ncclCommRegister(comm, (void*)buffer, BYTES, &handle) : LACKED;
}
static int nccl_memory(void) {
  void* memory;
  return nccl.ncclMemAlloc ? nccl.ncclMemAlloc(&memory, 1 << 20) : LACKED;
}
static int nccl_destroy(void) { return nccl.ncclCommDestroy(comm); }
static int nccl_abort(void) { return nccl.ncclCommAbort(comm); }
static int new_thread(void) { return 0; } /* run() takes the rest of the steps to a thread */

typedef int (*Step)(void);
static const struct { Step step; const char* name; } NAMES[] = {
  {cu_init, "cuInit"}, {push_1, "push 1"}, {pop, "pop"}, {none, "set none"}, {reset_1, "reset 1"}, {create_1, "create on 1"},
  {destroy_elsewhere, "destroyed by a thread"}, {visible_1, "CUDA_VISIBLE_DEVICES=1"}, {runtime_count, "cudaGetDeviceCount"},
  {runtime_0, "cudaSetDevice(0)"}, {runtime_1, "cudaSetDevice(1)"}, {runtime_reset, "cudaDeviceReset"}, {nccl_init, "InitRank"},
  {nccl_all_1, "InitAll {1}"}, {nccl_split, "Split"}, {nccl_all_reduce, "AllReduce"}, {nccl_group, "group of AllReduce"},
  {nccl_register, "Register"}, {nccl_memory, "MemAlloc"}, {nccl_destroy, "Destroy"}, {nccl_abort, "Abort"},
  {new_thread, "new thread:"},
};
static const char* name_of(Step step) {
  size_t i = 0;
  while (NAMES[i].step != step) i++;
  return NAMES[i].name;
}

/* What the case ends with. */
typedef enum { INIT, CONFIG, SCALABLE, GROUPED, MEMORY } End;
static const char* const ENDS[] = {"InitRank", "InitRankConfig", "InitRankScalable", "InitRank in a group", "MemAlloc"};

static const struct { Step steps[8]; End end; } CASES[] = {
  /* Nothing was current, ever. */
  {{0}, INIT},
  {{cu_init}, INIT},
  {{cu_init}, CONFIG},
  {{cu_init}, SCALABLE},
  {{cu_init}, GROUPED},
  {{push_1, new_thread}, INIT},
  {{visible_1, cu_init}, INIT},
  /* A context is current. */
  {{push_1}, INIT},
  {{create_1}, INIT},
  {{create_1, destroy_elsewhere}, INIT},
  {{push_1, reset_1}, INIT},
  /* It was taken away. */
  {{push_1, pop}, INIT},
  {{push_1, pop}, GROUPED},
  {{push_1, none}, INIT},
  /* Another copy of the runtime has a device. */
  {{runtime_count}, INIT},
  {{runtime_0, pop}, INIT},
  {{runtime_1}, INIT},
  {{runtime_1, pop}, INIT},
  {{runtime_1, none}, INIT},
  {{runtime_1, new_thread}, INIT},
  {{runtime_1, runtime_reset}, INIT},
  {{runtime_1, runtime_reset, none}, INIT},
  {{runtime_0, runtime_reset}, INIT},
  /* NCCL has worked with device 1 on this thread. */
  {{push_1, nccl_init, pop}, INIT},
  {{push_1, nccl_init, none}, INIT},
  {{push_1, nccl_init, none}, GROUPED},
  {{push_1, nccl_init, nccl_destroy, none}, INIT},
  {{push_1, nccl_init, nccl_split, none}, INIT},
  {{push_1, nccl_init, nccl_group, none}, INIT},
  {{push_1, nccl_init, none, new_thread}, INIT},
  {{nccl_all_1}, INIT},
  {{nccl_all_1, none}, INIT},
  {{nccl_all_1, none, new_thread}, INIT},
  /* NCCL works on a thread without a context, with a communicator of device 1 of another thread: what each call leaves there. */
  {{push_1, nccl_init, new_thread, nccl_split}, INIT},
  {{push_1, nccl_init, new_thread, nccl_split, none}, INIT},
  {{push_1, nccl_init, new_thread, nccl_all_reduce}, INIT},
  {{push_1, nccl_init, new_thread, nccl_all_reduce, none}, INIT},
  {{push_1, nccl_init, new_thread, nccl_group}, INIT},
  {{push_1, nccl_init, new_thread, nccl_group, none}, INIT},
  {{push_1, nccl_init, new_thread, nccl_register}, INIT},
  {{push_1, nccl_init, new_thread, nccl_register, none}, INIT},
  {{push_1, nccl_init, new_thread, nccl_destroy}, INIT},
  {{push_1, nccl_init, new_thread, nccl_destroy, none}, INIT},
  {{push_1, nccl_init, new_thread, nccl_abort}, INIT},
  {{push_1, nccl_init, new_thread, nccl_abort, none}, INIT},
  {{push_1, nccl_init, new_thread, nccl_memory}, INIT},
  /* The same with a context, which is taken away: a call outside groups is enough. */
  {{push_1, nccl_init, new_thread, push_1, nccl_all_reduce, none}, INIT},
  {{push_1, nccl_init, new_thread, push_1, nccl_all_reduce, none}, MEMORY},
  /* Memory of NCCL's. */
  {{0}, MEMORY},
  {{cu_init}, MEMORY},
  {{push_1}, MEMORY},
  {{push_1, pop}, MEMORY},
  {{runtime_1, pop}, MEMORY},
  {{push_1, nccl_init, none}, MEMORY},
  {{push_1, nccl_init, none, new_thread}, MEMORY},
};
enum { NUMBER_OF_CASES = sizeof CASES / sizeof CASES[0] };

static int needs_runtime(int number) {
  for (const Step* step = CASES[number].steps; *step; step++)
    if (*step == runtime_count || *step == runtime_0 || *step == runtime_1 || *step == runtime_reset) return 1;
  return 0;
}

static void title(int number, char* text, size_t room) {
  size_t at = 0;
  *text = 0;
  for (const Step* step = CASES[number].steps; *step; step++)
    at += (size_t)snprintf(text + at, room - at, "%s%s ", name_of(*step), *step == new_thread ? "" : ",");
  snprintf(text + at, room - at, "%s", ENDS[CASES[number].end]);
}

/* Device of the current context. */
static const char* current(void) {
  static char texts[8][16];
  static int next;
  char* text = texts[next++ % 8];
  void* context = NULL;
  int device, code = driver.cuCtxGetCurrent(&context);
  if (!code && !context) return "none";
  if (!code) code = driver.cuCtxGetDevice(&device);
  snprintf(text, sizeof texts[0], code ? "e%d" : "%d", code ? code : device);
  return text;
}

static void active(char* text, size_t room) {
  int count = 0, is_active;
  unsigned flags;
  size_t at = 0;
  *text = 0;
  driver.cuDeviceGetCount(&count);
  for (int device = 0; device < count && device < DEVICES; device++) {
    if (driver.cuDevicePrimaryCtxGetState(device, &flags, &is_active) || !is_active) continue;
    at += (size_t)snprintf(text + at, room - at, flags ? "%s%d:%u" : "%s%d", at ? "," : "", device, flags);
  }
  if (!at) snprintf(text, room, "none");
}

static void header(void) {
  printf("%-70s %-6s %-6s %-6s %-5s %-9s %s\n", "steps", "before", "result", "device", "after", "destroyed", "active");
}

/* The communicator or the memory in question. */
static void end(int number) {
  char text[256], devices[64], device[16] = "-";
  const char *before = current(), *after, *in_group = NULL, *destroyed = "-";
  void* made = NULL;
  Id id;
  int code, which = -1;
  switch (CASES[number].end) {
    case INIT:
      code = make(&made);
      break;
    case CONFIG:
      code = nccl.ncclGetUniqueId(&id);
      if (!code) code = nccl.ncclCommInitRankConfig(&made, 1, id, 0, NULL);
      break;
    case SCALABLE:
      if (!nccl.ncclCommInitRankScalable) return;
      code = nccl.ncclGetUniqueId(&id);
      if (!code) code = nccl.ncclCommInitRankScalable(&made, 1, 0, 1, &id, NULL);
      break;
    case GROUPED:
      code = nccl.ncclGroupStart();
      if (!code) code = make(&made);
      in_group = current();
      int ended = nccl.ncclGroupEnd();
      if (!code) code = ended;
      break;
    default:
      if (!nccl.ncclMemAlloc) return;
      code = nccl.ncclMemAlloc(&made, 1 << 20);
  }
  after = current();
  active(devices, sizeof devices);
  if (!code && CASES[number].end == MEMORY) {
    code = driver.cuPointerGetAttribute(&which, POINTER_DEVICE_ORDINAL, (unsigned long long)made);
    nccl.ncclMemFree(made);
  } else if (!code) {
    code = nccl.ncclCommCuDevice(made, &which);
    nccl.ncclCommDestroy(made);
  }
  if (which >= 0) snprintf(device, sizeof device, "%d", which), destroyed = current();
  title(number, text, sizeof text);
  printf("%-70s %-6s %-6d %-6s %-5s %-9s %s\n", text, before, code, device, after, destroyed, devices);
  if (in_group) printf("  current in the group, after InitRank: %s\n", in_group);
  fflush(stdout);
}

struct rest { int number; const Step* step; };

static void* run(void* argument) {
  struct rest rest = *(struct rest*)argument;
  for (; *rest.step; rest.step++) {
    if (*rest.step == new_thread) {
      pthread_t thread;
      rest.step++;
      pthread_create(&thread, NULL, run, &rest);
      pthread_join(thread, NULL);
      return NULL;
    }
    int code = (*rest.step)();
    if (code == LACKED) return NULL;
    if (code) printf("  %s: %d\n", name_of(*rest.step), code);
  }
  end(rest.number);
  return NULL;
}

static void about(void) {
  int version = 0, count = 0, mode = -1;
  char name[128];
  load();
  nccl.ncclGetVersion(&version);
  printf("NCCL %d", version);
  driver.cuInit(0);
  driver.cuDriverGetVersion(&version);
  printf(", driver of CUDA %d", version);
  if (runtime_path) runtime.cudaRuntimeGetVersion(&version), printf(", the program's runtime %d", version);
  printf("\n");
  driver.cuDeviceGetCount(&count);
  for (int device = 0; device < count; device++) {
    driver.cuDeviceGetName(name, sizeof name, device);
    driver.cuDeviceGetAttribute(&mode, COMPUTE_MODE, device);
    printf("device %d: %s, compute mode %d\n", device, name, mode);
  }
  fflush(stdout);
  _exit(count < 2);
}

typedef struct { pid_t process; int number, output; } Child;

/* Begins a case, or with -1 the head, in a process of its own: nothing of CUDA is loaded or called in this one. */
static Child begin(int number) {
  int ends[2];
  if (pipe(ends)) perror("pipe"), exit(2);
  fflush(stdout);
  pid_t process = fork();
  if (process < 0) perror("fork"), exit(2);
  if (!process) {
    dup2(ends[1], STDOUT_FILENO);
    close(ends[0]), close(ends[1]);
    alarm(LIMIT);
    if (number < 0) about();
    load();
    run(&(struct rest){number, CASES[number].steps});
    fflush(stdout);
    _exit(0);
  }
  close(ends[1]);
  return (Child){process, number, ends[0]};
}

/* Waits for it, shows what it wrote, and says whether it ended as it should. */
static int finish(Child child) {
  char text[1024];
  ssize_t bytes;
  int status;
  while ((bytes = read(child.output, text, sizeof text)) > 0) fwrite(text, 1, (size_t)bytes, stdout);
  close(child.output);
  waitpid(child.process, &status, 0);
  if (WIFSIGNALED(status)) {
    snprintf(text, sizeof text, "the head");
    if (child.number >= 0) title(child.number, text, sizeof text);
    printf("%-70s ended by signal %d\n", text, WTERMSIG(status));
  }
  fflush(stdout);
  return !status;
}

int main(int argc, char** argv) {
  const char* multicast = getenv("NCCL_NVLS_ENABLE");
  if (argc < 3 || argc > 4) return fprintf(stderr, "usage: %s LIBCUDA LIBNCCL [LIBCUDART]\n", argv[0]), 2;
  if (multicast && strcmp(multicast, "0")) return fprintf(stderr, "NCCL_NVLS_ENABLE is %s, expected 0\n", multicast), 2;
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  driver_path = argv[1], nccl_path = argv[2], runtime_path = argv[3];
  if (!finish(begin(-1))) return fprintf(stderr, "two GPUs are needed\n"), 2;
  header();
  for (int number = 0; number < NUMBER_OF_CASES;) {
    Child children[AT_ONCE];
    int count = 0;
    for (; number < NUMBER_OF_CASES && count < AT_ONCE; number++)
      if (runtime_path || !needs_runtime(number)) children[count++] = begin(number);
    for (int i = 0; i < count; i++) finish(children[i]);
  }
  return 0;
}

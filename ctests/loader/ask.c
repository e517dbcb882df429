/* Does what its arguments say, in order, and prints each answer: calls of NCCL's functions on a machine without a GPU.
 *
 *   dlopen:PATH    maps a library before anything is asked
 *   beside:PATH    maps a library in another thread while this one calls ncclGetVersion
 *   version        ncclGetVersion
 *   string:CODE    ncclGetErrorString
 *   init           ncclCommInitAll of one rank
 *   pair           ncclCommInitAll of two ranks
 *   destroy        ncclCommDestroy of the one rank
 *   bcast broadcast reduce allgather    one call each on that communicator
 *   suspend        ncclCommSuspend, which older libraries lack
 *   revoke         ncclCommRevoke, likewise
 *   world          ncclTeamWorld's first word, which older libraries lack and which returns a structure
 *   race           ncclGetVersion from 64 threads at once
 *   rank           ncclCommInitRank with an id of known bytes, passed by value
 *   put            ncclPutSignal, eleven arguments, looked up
 *   team           ncclTeamWorld's three words, looked up
 *   toy:PATH       the toy's own counters
 *   hold           waits until its standard input ends
 *   mapped         every mapped file whose name begins with libnccl or libwindlass */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <nccl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static ncclComm_t communicator;

static void print_mapped(void) {
  char line[4096], last[4096] = "";
  FILE* maps = fopen("/proc/self/maps", "r");
  while (maps && fgets(line, sizeof line, maps)) {
    char* path = strchr(line, '/');
    if (!path || !(strstr(path, "/libnccl") || strstr(path, "/libwindlass")) || !strcmp(path, last)) continue;
    strcpy(last, path);
    printf("mapped %s", path);
  }
  if (maps) fclose(maps);
}

static void print_toy(const char* path) {
  void* toy = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
  int* broadcasts = toy ? dlsym(toy, "toy_broadcasts") : NULL;
  printf("toy %d\n", broadcasts ? *broadcasts : -1);
}

enum { RACERS = 64 };
static pthread_barrier_t line_up;

static void* call_at_once(void* answer) {
  int version = 0;
  pthread_barrier_wait(&line_up);
  *(ncclResult_t*)answer = ncclGetVersion(&version);
  return NULL;
}

static void race(void) {
  pthread_t threads[RACERS];
  ncclResult_t answers[RACERS];
  int equal = 0;
  pthread_barrier_init(&line_up, NULL, RACERS);
  for (int i = 0; i < RACERS; i++) {
    if (pthread_create(&threads[i], NULL, call_at_once, &answers[i])) abort();
  }
  for (int i = 0; i < RACERS; i++) pthread_join(threads[i], NULL);
  for (int i = 0; i < RACERS; i++) equal += answers[i] == answers[0];
  printf("race %d of %d answered %d\n", equal, RACERS, (int)answers[0]);
}

static void* map_library(void* path) { return dlopen(path, RTLD_NOW | RTLD_LOCAL); }

static void beside(char* path) {
  pthread_t thread;
  void* library = NULL;
  int version = 0;
  if (pthread_create(&thread, NULL, map_library, path)) abort();
  usleep(100000);
  ncclGetVersion(&version);
  pthread_join(thread, &library);
  printf("beside %s %d\n", library ? "done" : "failed", version);
}

static void init_rank(void) {
  ncclUniqueId id;
  for (int i = 0; i < NCCL_UNIQUE_ID_BYTES; i++) id.internal[i] = (char)(i * 3 + 1);
  printf("rank %d\n", (int)ncclCommInitRank(&communicator, 5, id, 3));
}

/* All values differ, so that an argument in another's place is found. */
static void put(void) {
  void* address = dlsym(RTLD_DEFAULT, "ncclPutSignal");
  /* The window is an opaque pointer here, so that this compiles with headers that have no windows. */
  ncclResult_t (*function)(const void*, size_t, ncclDataType_t, int, void*, size_t, int, int, unsigned int, ncclComm_t,
                           cudaStream_t);
  memcpy(&function, &address, sizeof function);
  printf("put %d\n", function ? (int)function((void*)0x101, 0x10000000202, ncclDouble, 4, (void*)0x505,
                                              0x60000000606, 7, 8, 9, (ncclComm_t)0xa0a, (cudaStream_t)0xb0b) : -1);
}

struct team { int ranks, rank, stride; };

static void team(void) {
  void* address = dlsym(RTLD_DEFAULT, "ncclTeamWorld");
  struct team (*function)(ncclComm_t);
  memcpy(&function, &address, sizeof function);
  struct team world = function ? function(communicator) : (struct team){-1, -1, -1};
  printf("team %d %d %d\n", world.ranks, world.rank, world.stride);
}

static void obey(char* word) {
  int version = 0;
  if (!strncmp(word, "dlopen:", 7)) printf("dlopen %s\n", dlopen(word + 7, RTLD_NOW | RTLD_LOCAL) ? "done" : dlerror());
  else if (!strncmp(word, "beside:", 7)) beside(word + 7);
  else if (!strcmp(word, "version")) {
    ncclResult_t answer = ncclGetVersion(&version);
    printf("version %d %d\n", (int)answer, version);
  }
  else if (!strncmp(word, "string:", 7)) printf("string %s\n", ncclGetErrorString((ncclResult_t)atoi(word + 7)));
  else if (!strcmp(word, "init")) printf("init %d\n", (int)ncclCommInitAll(&communicator, 1, NULL));
  else if (!strcmp(word, "pair")) {
    ncclComm_t pair[2];
    printf("pair %d\n", (int)ncclCommInitAll(pair, 2, NULL));
  }
  else if (!strcmp(word, "destroy")) printf("destroy %d\n", (int)ncclCommDestroy(communicator));
  else if (!strcmp(word, "hold")) {
    printf("hold\n");
    fflush(stdout);
    while (getchar() != EOF) continue;
  }
  else if (!strcmp(word, "bcast")) printf("bcast %d\n", (int)ncclBcast(NULL, 0, ncclInt8, 0, communicator, NULL));
  else if (!strcmp(word, "broadcast"))
    printf("broadcast %d\n", (int)ncclBroadcast(NULL, NULL, 0, ncclInt8, 0, communicator, NULL));
  else if (!strcmp(word, "reduce"))
    printf("reduce %d\n", (int)ncclReduce(NULL, NULL, 0, ncclInt8, ncclSum, 0, communicator, NULL));
  else if (!strcmp(word, "allgather"))
    printf("allgather %d\n", (int)ncclAllGather(NULL, NULL, 0, ncclInt8, communicator, NULL));
  else if (!strcmp(word, "suspend") || !strcmp(word, "revoke") || !strcmp(word, "world")) {
    /* Looked up, not linked, as this program also runs with libraries that lack them. */
    const char* name = word[0] == 's' ? "ncclCommSuspend" : word[0] == 'r' ? "ncclCommRevoke" : "ncclTeamWorld";
    void* address = dlsym(RTLD_DEFAULT, name);
    ncclResult_t (*function)(ncclComm_t, int);
    memcpy(&function, &address, sizeof function);
    if (function) printf("%s %d\n", word, (int)function(communicator, 1));
    else printf("%s absent\n", word);
  }
  else if (!strcmp(word, "race")) race();
  else if (!strcmp(word, "rank")) init_rank();
  else if (!strcmp(word, "put")) put();
  else if (!strcmp(word, "team")) team();
  else if (!strncmp(word, "toy:", 4)) print_toy(word + 4);
  else if (!strcmp(word, "mapped")) print_mapped();
  else printf("what is %s\n", word);
}

int main(int count, char** words) {
  for (int i = 1; i < count; i++) {
    obey(words[i]);
    fflush(stdout);
  }
  return 0;
}

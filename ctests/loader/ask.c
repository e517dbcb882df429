/* Does what its arguments say, in order, and prints each answer: calls of NCCL's functions on a machine without a GPU.
 *
 *   dlopen:PATH    maps a library before anything is asked
 *   version        ncclGetVersion
 *   string:CODE    ncclGetErrorString
 *   init           ncclCommInitAll of one rank
 *   bcast broadcast reduce allgather    one call each on that communicator
 *   suspend        ncclCommSuspend, which older libraries lack
 *   world          ncclTeamWorld's first word, which older libraries lack and which returns a structure
 *   toy:PATH       the toy's own counters
 *   mapped         every mapped file whose name begins with libnccl or libwindlass */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

static void obey(const char* word) {
  int version = 0;
  if (!strncmp(word, "dlopen:", 7)) printf("dlopen %s\n", dlopen(word + 7, RTLD_NOW | RTLD_LOCAL) ? "done" : dlerror());
  else if (!strcmp(word, "version")) {
    ncclResult_t answer = ncclGetVersion(&version);
    printf("version %d %d\n", (int)answer, version);
  }
  else if (!strncmp(word, "string:", 7)) printf("string %s\n", ncclGetErrorString((ncclResult_t)atoi(word + 7)));
  else if (!strcmp(word, "init")) printf("init %d\n", (int)ncclCommInitAll(&communicator, 1, NULL));
  else if (!strcmp(word, "bcast")) printf("bcast %d\n", (int)ncclBcast(NULL, 0, ncclInt8, 0, communicator, NULL));
  else if (!strcmp(word, "broadcast"))
    printf("broadcast %d\n", (int)ncclBroadcast(NULL, NULL, 0, ncclInt8, 0, communicator, NULL));
  else if (!strcmp(word, "reduce"))
    printf("reduce %d\n", (int)ncclReduce(NULL, NULL, 0, ncclInt8, ncclSum, 0, communicator, NULL));
  else if (!strcmp(word, "allgather"))
    printf("allgather %d\n", (int)ncclAllGather(NULL, NULL, 0, ncclInt8, communicator, NULL));
  else if (!strcmp(word, "suspend") || !strcmp(word, "world")) {
    /* Looked up, not linked: this program also runs over libraries that lack them. */
    void* address = dlsym(RTLD_DEFAULT, word[0] == 's' ? "ncclCommSuspend" : "ncclTeamWorld");
    ncclResult_t (*function)(ncclComm_t, int);
    memcpy(&function, &address, sizeof function);
    if (function) printf("%s %d\n", word, (int)function(communicator, 1));
    else printf("%s absent\n", word);
  }
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

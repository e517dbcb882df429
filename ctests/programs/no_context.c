/* Holds that a communicator can be made on a thread that has no current context, as vLLM's rank 0 makes it: on the device that NCCL takes
 * there, whose context is current afterwards, as NCCL leaves it. Allocations take the same device and make nothing current. */
#include "../support/collective.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static CUcontext current(void) {
  CUcontext context = NULL;
  CUDA(cuCtxGetCurrent(&context));
  return context;
}

static void take_context(void) { CUDA(cuCtxSetCurrent(NULL)); }

/* Makes the world, and holds that this thread then has the context of the rank's device. */
static ncclComm_t made(struct rank* self, int slot) {
  ncclComm_t communicator = NULL;
  ncclUniqueId id = share_id(self, slot, 0);
  NCCL(ncclCommInitRank(&communicator, self->ranks, id, self->rank));
  CHECK(current() == self->context);
  return communicator;
}

static void used(struct rank* self, ncclComm_t communicator, uint64_t key) {
  int device = -1;
  NCCL(ncclCommCuDevice(communicator, &device));
  EQUAL(device, self->device);
  for (size_t count = 1000; count < 20000; count *= 3) {
    struct transfer transfer = {.which = ALL_REDUCE, .type = ncclFloat, .op = ncclSum, .count = count, .rank = self->rank,
                                .ranks = self->ranks, .key = key + count};
    transfer_run(&transfer, communicator, self);
  }
  meet(self);
  NCCL(ncclCommDestroy(communicator));
}

/* The context was current, and was taken off the thread. NCCL has not been called there. */
static void popped(struct rank* self) {
  if (!self->rank) take_context();
  used(self, made(self, 0), 1);
}

struct on_thread { struct rank* self; ncclComm_t communicator; };

static void* make_on_thread(void* argument) {
  struct on_thread* on_thread = argument;
  CHECK(!current());
  on_thread->communicator = made(on_thread->self, 1);
  return NULL;
}

/* A new thread, which never had one. The communicator is used on another. */
static void thread(struct rank* self) {
  struct on_thread on_thread = {.self = self};
  pthread_t thread;
  if (self->rank) {
    on_thread.communicator = made(self, 1);
  } else {
    if (pthread_create(&thread, NULL, make_on_thread, &on_thread)) abort();
    pthread_join(thread, NULL);
  }
  used(self, on_thread.communicator, 2);
}

/* In a group. NCCL's own call has a context current before the group ends. */
static void in_group(struct on_thread* on_thread, int slot) {
  ncclUniqueId id = share_id(on_thread->self, slot, 0);
  NCCL(ncclGroupStart());
  NCCL(ncclCommInitRank(&on_thread->communicator, on_thread->self->ranks, id, on_thread->self->rank));
  CHECK(current());
  NCCL(ncclGroupEnd());
}

static void* group_on_thread(void* argument) {
  struct on_thread* on_thread = argument;
  in_group(on_thread, 2);
  CHECK(current() == on_thread->self->context);
  return NULL;
}

static void group(struct rank* self) {
  struct on_thread on_thread = {.self = self};
  pthread_t thread;
  if (self->rank) {
    group_on_thread(&on_thread);
  } else {
    if (pthread_create(&thread, NULL, group_on_thread, &on_thread)) abort();
    pthread_join(thread, NULL);
  }
  used(self, on_thread.communicator, 3);
}

static void* allocate_on_thread(void* argument) {
  void* memory = NULL;
  int device = -1;
  (void)argument;
  for (int round = 0; round < 3; round++) {
    NCCL(ncclMemAlloc(&memory, 1 << 20));
    CHECK(!current());
    CUDA(cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, (CUdeviceptr)memory));
    EQUAL(device, 0);
    if (round == 2) use_device(0);
    NCCL(ncclMemFree(memory));
    take_context();
  }
  return NULL;
}

/* Memory of a thread without a context. */
static void memory(struct rank* self) {
  pthread_t thread;
  if (self->rank) return;
  if (pthread_create(&thread, NULL, allocate_on_thread, NULL)) abort();
  pthread_join(thread, NULL);
}

/* NCCL has worked on this thread with the rank's device, and the context was taken since: NCCL goes back to that device. Releases differ in
 * what is current afterwards; in a group it is device 0, which is not the communicator's. */
static void after_nccl(struct rank* self) {
  struct on_thread on_thread = {.self = self};
  ncclComm_t communicator = NULL;
  used(self, made(self, 3), 4);
  take_context();
  ncclUniqueId id = share_id(self, 4, 0);
  NCCL(ncclCommInitRank(&communicator, self->ranks, id, self->rank));
  CUDA(cuCtxSetCurrent(self->context));
  used(self, communicator, 5);
  take_context();
  in_group(&on_thread, 6);
  CUDA(cuCtxSetCurrent(self->context));
  used(self, on_thread.communicator, 6);
}

static void* call_on_thread(void* argument) {
  struct on_thread* on_thread = argument;
  struct rank* self = on_thread->self;
  ncclUniqueId id = share_id(self, 8, 0);
  struct transfer transfer = {.which = ALL_REDUCE, .type = ncclFloat, .op = ncclSum, .count = 1000, .rank = self->rank,
                              .ranks = self->ranks, .key = 7};
  CUDA(cuCtxSetCurrent(self->context));
  transfer_run(&transfer, on_thread->communicator, self);
  take_context();
  NCCL(ncclCommInitRank(&on_thread->communicator, self->ranks, id, self->rank));
  return NULL;
}

/* The same on a thread that has made no communicator, but a call. */
static void after_call(struct rank* self) {
  ncclComm_t first = made(self, 7);
  struct on_thread on_thread = {.self = self, .communicator = first};
  pthread_t thread;
  if (pthread_create(&thread, NULL, call_on_thread, &on_thread)) abort();
  pthread_join(thread, NULL);
  used(self, on_thread.communicator, 8);
  NCCL(ncclCommDestroy(first));
}

/* Every rank lacks a context, and NCCL's runtime is shared (newer_nccl.c): it says which device is the rank's. */
static void runtime(struct rank* self) {
  char device[8];
  snprintf(device, sizeof device, "%d", self->device);
  setenv("CTESTS_RUNTIME_DEVICE", device, 1);
  take_context();
  used(self, made(self, 5), 6);
}

static void body(struct rank* self) {
  RUN_PART(popped, self);
  RUN_PART(thread, self);
  RUN_PART(group, self);
  RUN_PART(memory, self);
  RUN_PART(after_nccl, self);
  RUN_PART(after_call, self);
}

int main(int count, char** arguments) {
  begin("no_context", 60);
  choose(count, arguments);
  bool is_runtime_shared = count > 1 && !strcmp(arguments[1], "runtime");
  run_ranks("processes", PROCESSES, rank_count(2), is_runtime_shared ? runtime : body, NULL);
  return finish();
}

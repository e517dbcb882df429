/* Holds that a deregistered window is gone although Windlass keeps it: calls over its memory run as if it had never been, also
 * where other ranks' buffers lie elsewhere. (With NCCL a buffer that is in a window on some ranks only hangs, or gives wrong
 * bytes.) */
#include "../support/windows.h"

enum { FIRST };

/* Rank 0's buffer is in a former window, the others' in memory that cannot have one. Then all buffers are in a window again. */
static void on_one_rank(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  for (uint64_t round = 0; round < 3; round++) {
    struct memory memory = used_block(self, communicator, 100 + round);
    struct memory plain = memory_alloc(self, PLAIN, window_room(self));
    window_gather(self, communicator, self->rank ? &plain : &memory, 0, 110 + round);
    ncclWindow_t window = window_over(communicator, memory.at, memory.bytes);
    window_gather(self, communicator, &memory, 0, 120 + round);
    meet(self);
    window_end(communicator, window);
    memory_free(self, &memory);
    memory_free(self, &plain);
  }
  NCCL(ncclCommDestroy(communicator));
}

/* There are two such blocks, and rank 0 uses the other one. */
static void unlike_blocks(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  struct memory first = used_block(self, communicator, 200), second = used_block(self, communicator, 201);
  window_gather(self, communicator, self->rank ? &first : &second, 0, 202);
  /* The blocks are freed in another order on rank 0 and allocated again. Each rank's window is the one that it registers,
   * whichever block it has. */
  memory_free(self, self->rank ? &first : &second);
  memory_free(self, self->rank ? &second : &first);
  for (uint64_t round = 0; round < 3; round++) {
    struct memory one = memory_alloc(self, NCCLS, window_room(self)), other = memory_alloc(self, NCCLS, window_room(self));
    const struct memory* mine = self->rank == 1 && round ? &other : &one;
    ncclWindow_t window = window_over(communicator, mine->at, mine->bytes);
    window_gather(self, communicator, mine, 0, 210 + round);
    meet(self);
    window_end(communicator, window);
    memory_free(self, &one);
    memory_free(self, &other);
  }
  NCCL(ncclCommDestroy(communicator));
}

/* A window over a part of a former one, on all ranks; then a window over all that contains a former part. */
static void other_ranges(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  size_t room = window_room(self);
  struct memory memory = memory_alloc(self, NCCLS, 2 * room);
  ncclWindow_t window = window_over(communicator, memory.at, memory.bytes);
  window_gather(self, communicator, &memory, room, 300);
  meet(self);
  window_end(communicator, window);
  window = window_over(communicator, memory.at + room, room);
  window_gather(self, communicator, &memory, room, 301);
  meet(self);
  window_end(communicator, window);
  window = window_over(communicator, memory.at, memory.bytes);
  window_gather(self, communicator, &memory, room, 302);
  meet(self);
  window_end(communicator, window);
  memory_free(self, &memory);
  NCCL(ncclCommDestroy(communicator));
}

/* The program registers a buffer where the former window was, and uses it. */
static void registered(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  struct memory memory = used_block(self, communicator, 400);
  void* handle = NULL;
  NCCL(ncclCommRegister(communicator, memory.at, memory.bytes, &handle));
  window_gather(self, communicator, &memory, 0, 401);
  meet(self);
  NCCL(ncclCommDeregister(communicator, handle));
  memory_free(self, &memory);
  NCCL(ncclCommDestroy(communicator));
}

/* A window ends inside an open group, where NCCL ends it at once, and where the program deregisters a buffer that is the whole
 * block. */
static void ended_at_once(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  struct memory memory = used_block(self, communicator, 600);
  ncclWindow_t window = window_over(communicator, memory.at, memory.bytes);
  meet(self);
  NCCL(ncclGroupStart());
  window_end(communicator, window);
  NCCL(ncclGroupEnd());
  CHECK(windows_live(communicator) <= 0);
  void* handle = NULL;
  NCCL(ncclCommRegister(communicator, memory.at, memory.bytes, &handle));
  window = window_over(communicator, memory.at + 4096, 4096);
  meet(self);
  window_end(communicator, window);
  NCCL(ncclCommDeregister(communicator, handle));
  CHECK(windows_live(communicator) <= 0);
  window_gather(self, communicator, &memory, 0, 601);
  memory_free(self, &memory);
  NCCL(ncclCommDestroy(communicator));
}

/* Rank 0 captures a call where its former window was. Not on GPUs, where NCCL registers buffers of graphs itself, and hangs
 * where one rank's memory cannot be. */
static void captured(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  struct memory memory = used_block(self, communicator, 500), plain = memory_alloc(self, PLAIN, window_room(self));
  const struct memory* mine = self->rank ? &plain : &memory;
  size_t count = gather_count(self, 4096);
  struct gather gather = gather_into(self, mine->at + gather_room(self, count), mine, 0, count, 501);
  gather_prepare(&gather);
  CUgraph graph;
  CUgraphExec replay;
  CUDA(cuStreamBeginCapture_v2(self->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  gather_launch(&gather, communicator, self->stream);
  CUDA(cuStreamEndCapture(self->stream, &graph));
  CUDA(cuGraphInstantiateWithFlags(&replay, graph, 0));
  meet(self);
  CUDA(cuGraphLaunch(replay, self->stream));
  wait_for(self->stream);
  gather_verify(&gather, self);
  meet(self);
  CUDA(cuGraphExecDestroy(replay));
  CUDA(cuGraphDestroy(graph));
  memory_free(self, &memory);
  memory_free(self, &plain);
  NCCL(ncclCommDestroy(communicator));
}

static void all(struct rank* self) {
  RUN_PART(on_one_rank, self);
  RUN_PART(unlike_blocks, self);
  RUN_PART(other_ranges, self);
  RUN_PART(registered, self);
  RUN_PART(ended_at_once, self);
  if (!on_gpus()) RUN_PART(captured, self);
}

int main(int count, char** words) {
  begin("windows_repair", 280);
  choose(count, words);
  windows_sections(rank_count(4), all);
  return finish();
}

/* Holds: a window that was deregistered has gone, whatever is kept of it: calls over its memory run as if it had never been, also
 * where other ranks' buffers lie elsewhere. (On NCCL a buffer in a window on some ranks only hangs, or gives wrong bytes.) */
#include "../support/windows.h"

enum { FIRST };

/* Rank 0 in what was a window, the others in memory that no window can be over; then all of them, in a window again. */
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

/* Of two such blocks rank 0 takes the other one. */
static void unlike_blocks(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  struct memory first = used_block(self, communicator, 200), second = used_block(self, communicator, 201);
  window_gather(self, communicator, self->rank ? &first : &second, 0, 202);
  /* Freed in another order, and allocated again: whoever has which block, its window is the one it registers. */
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

/* A window over a part of what was one, on all ranks; then what was a part and lies in a window of all. */
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

/* Registered by itself where the window was, and used so. */
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

/* Ended in an open group, which NCCL hears of at once; and where the program ends a registration of the whole block. */
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

/* Captured by rank 0 where its window was. Not on GPUs: NCCL itself registers what is captured, and hangs where one rank's memory
 * cannot be. */
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

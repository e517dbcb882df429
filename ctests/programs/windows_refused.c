/* Holds that where one rank registers memory of which NCCL makes no window, or from an allocation of another size, all ranks are
 * refused, where NCCL alone hangs. The log names the rank, and the next window is made. Runs through Windlass with kept windows. */
#include "../support/windows.h"

#include <stdlib.h>
#include <string.h>

enum { FIRST };

static ncclResult_t ask(ncclComm_t communicator, char* at, size_t bytes) {
  ncclWindow_t window = NULL;
  ncclResult_t code = ncclCommWindowRegister(communicator, at, bytes, &window, NCCL_WIN_COLL_SYMMETRIC);
  count_calls("ncclCommWindowRegister", 1);
  CHECK(!window || code == ncclSuccess);
  return code;
}

/* Afterwards all ranks make the window. */
static void then_fine(struct rank* self, ncclComm_t communicator, const struct memory* memory, uint64_t key) {
  meet(self);
  ncclWindow_t window = window_over(communicator, memory->at, memory->bytes);
  window_gather(self, communicator, memory, 0, key);
  meet(self);
  window_end(communicator, window);
}

static void one_rank(struct rank* self) {
  ncclComm_t communicator = world(self, FIRST);
  struct memory memory = memory_alloc(self, NCCLS, window_room(self));
  struct memory plain = memory_alloc(self, PLAIN, window_room(self));

  bool is_one = self->rank == 1;
  EQUAL(ask(communicator, memory.at + (is_one ? 8 : 0), 4096), ncclInvalidArgument);
  CHECK(is_one || log_says("ncclCommWindowRegister", "rank 1 4096 bytes"));
  then_fine(self, communicator, &memory, 100);

  is_one = self->rank == 0;
  EQUAL(ask(communicator, is_one ? plain.at : memory.at, 8192), ncclUnhandledCudaError);
  CHECK(is_one || log_says("ncclCommWindowRegister", "rank 0 8192 bytes"));
  then_fine(self, communicator, &memory, 101);

  is_one = self->rank == self->ranks - 1;
  EQUAL(ask(communicator, is_one ? NULL : memory.at, 12288), is_one ? ncclSuccess : ncclInvalidUsage);
  CHECK(is_one || log_says("ncclCommWindowRegister", "12288 bytes at 0x0"));
  then_fine(self, communicator, &memory, 102);

  struct memory large = memory_alloc(self, NCCLS, (self->rank == 1 ? 2 : 1) * window_room(self));
  EQUAL(ask(communicator, large.at, 16384), ncclUnhandledCudaError);
  CHECK(log_says("rank 1 differs in the size of its allocation", "16384 bytes"));
  then_fine(self, communicator, &memory, 103);

  /* Only one rank has a window over the same block already. */
  ncclWindow_t window = window_over(communicator, memory.at, 4096);
  struct memory other = memory_alloc(self, NCCLS, window_room(self));
  EQUAL(ask(communicator, self->rank == 2 ? memory.at + 4096 : other.at, 20480), ncclInvalidUsage);
  CHECK(log_says("rank 2 differs in whether its allocation has a window already", "20480 bytes"));
  meet(self);
  window_end(communicator, window);
  then_fine(self, communicator, &memory, 104);

  memory_free(self, &large);
  memory_free(self, &other);
  memory_free(self, &memory);
  memory_free(self, &plain);
  NCCL(ncclCommDestroy(communicator));
}

static void all(struct rank* self) {
  if (self->ranks < 3) return;
  RUN_PART(one_rank, self);
}

int main(int count, char** words) {
  begin("windows_refused", 110);
  choose(count, words);
  windows_sections(rank_count(4), all);
  return finish();
}

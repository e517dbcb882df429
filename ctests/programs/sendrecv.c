/* Holds that sends and receives move every byte: to oneself in a group, around a ring, between all pairs, with zero counts,
 * several messages to one peer in order, and unequal sizes. */
#include "../support/reference.h"

#include <stdlib.h>
#include <string.h>

struct message { void* device; size_t bytes; uint64_t key; int source; };

static struct message outgoing(uint64_t key, int source, size_t bytes) {
  struct message message = {device_alloc(bytes), bytes, key, source};
  char* text = malloc(bytes + 1);
  input_fill(text, key, source, 0, bytes, ncclUint8, ncclSum);
  upload(message.device, text, bytes);
  free(text);
  return message;
}

static struct message incoming(uint64_t key, int source, size_t bytes) {
  struct message message = {device_alloc(bytes), bytes, key, source};
  device_fill(message.device, 0xee, bytes);
  return message;
}

static void verify(struct rank* self, struct message* message) {
  char* seen = malloc(message->bytes + 1);
  char* wanted = malloc(message->bytes + 1);
  download(seen, message->device, message->bytes);
  input_fill(wanted, message->key, message->source, 0, message->bytes, ncclUint8, ncclSum);
  if (!CHECK(memcmp(seen, wanted, message->bytes) == 0)) {
    fprintf(stderr, "  rank %d: %zu bytes from %d\n", self->rank, message->bytes, message->source);
  }
  record(self, seen, message->bytes);
  free(seen);
  free(wanted);
  device_free(message->device);
}

static void send(struct message* message, int peer, ncclComm_t communicator, CUstream stream) {
  NCCL(ncclSend(message->device, message->bytes, ncclUint8, peer, communicator, as_cuda(stream)));
}

static void receive(struct message* message, int peer, ncclComm_t communicator, CUstream stream) {
  NCCL(ncclRecv(message->device, message->bytes, ncclUint8, peer, communicator, as_cuda(stream)));
}

static void to_oneself(struct rank* self, ncclComm_t communicator) {
  struct message from = outgoing(1, self->rank, 10007), to = incoming(1, self->rank, 10007);
  NCCL(ncclGroupStart());
  send(&from, self->rank, communicator, self->stream);
  receive(&to, self->rank, communicator, self->stream);
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  verify(self, &to);
  device_free(from.device);
}

static void ring(struct rank* self, ncclComm_t communicator, size_t bytes) {
  int next = (self->rank + 1) % self->ranks, before = (self->rank + self->ranks - 1) % self->ranks;
  struct message from = outgoing(bytes + 2, self->rank, bytes), to = incoming(bytes + 2, before, bytes);
  NCCL(ncclGroupStart());
  send(&from, next, communicator, self->stream);
  receive(&to, before, communicator, self->stream);
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  verify(self, &to);
  device_free(from.device);
}

/* Messages between all pairs, and to oneself, each of another size, zero among them. */
static void all_pairs(struct rank* self, ncclComm_t communicator) {
  struct message from[RANKS_MAX], to[RANKS_MAX];
  for (int peer = 0; peer < self->ranks; peer++) {
    from[peer] = outgoing(77, self->rank, (size_t)((self->rank * 3 + peer) % 5) * 4099);
    to[peer] = incoming(77, peer, (size_t)((peer * 3 + self->rank) % 5) * 4099);
  }
  NCCL(ncclGroupStart());
  for (int peer = 0; peer < self->ranks; peer++) {
    send(&from[peer], peer, communicator, self->stream);
    receive(&to[peer], peer, communicator, self->stream);
  }
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  for (int peer = 0; peer < self->ranks; peer++) {
    verify(self, &to[peer]);
    device_free(from[peer].device);
  }
}

/* Messages without a group from rank 0 to the last rank arrive in the order of the calls. */
static void one_after_another(struct rank* self, ncclComm_t communicator) {
  enum { MESSAGES = 6 };
  int last = self->ranks - 1;
  for (int i = 0; i < MESSAGES; i++) {
    size_t bytes = (size_t)1 << (2 * i + 2);
    if (self->rank == 0) {
      struct message message = outgoing(200 + (uint64_t)i, 0, bytes);
      send(&message, last, communicator, self->stream);
      wait_for(self->stream);
      device_free(message.device);
    } else if (self->rank == last) {
      struct message message = incoming(200 + (uint64_t)i, 0, bytes);
      receive(&message, 0, communicator, self->stream);
      wait_for(self->stream);
      verify(self, &message);
    }
  }
}

/* Two messages of one pair in one group also keep their order. */
static void two_in_a_group(struct rank* self, ncclComm_t communicator) {
  int peer = self->rank ^ 1;
  if (peer >= self->ranks) return;
  struct message from[2], to[2];
  for (int i = 0; i < 2; i++) {
    from[i] = outgoing(300 + (uint64_t)i, self->rank, 513);
    to[i] = incoming(300 + (uint64_t)i, peer, 513);
  }
  NCCL(ncclGroupStart());
  for (int i = 0; i < 2; i++) {
    send(&from[i], peer, communicator, self->stream);
    receive(&to[i], peer, communicator, self->stream);
  }
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  for (int i = 0; i < 2; i++) {
    verify(self, &to[i]);
    device_free(from[i].device);
  }
}

static void all(struct rank* self) {
  ncclComm_t communicator = world(self, 0);
  to_oneself(self, communicator);
  ring(self, communicator, 0);
  ring(self, communicator, 1);
  ring(self, communicator, 65537);
  ring(self, communicator, (4u << 20) + 5);
  all_pairs(self, communicator);
  one_after_another(self, communicator);
  two_in_a_group(self, communicator);
  NCCL(ncclCommDestroy(communicator));
}

int main(void) {
  begin("sendrecv", 280);
  int ranks = rank_count(4);
  run_ranks("processes", PROCESSES, ranks, all, NULL);
  run_ranks("pair", PROCESSES, 2, all, NULL);
  run_ranks("threads", THREADS, ranks, all, NULL);
  return finish();
}

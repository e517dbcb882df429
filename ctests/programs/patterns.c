/* Holds that groups of sends and receives move every byte in any pattern. Cases: all-to-all, gather, scatter, hypercube, several
 * messages a pair, hundreds of messages, zero counts, to oneself in every mix, every type, every alignment, messages larger than
 * any ring, two communicators, collectives among them, one communicator on several streams, nested groups, and wrong arguments
 * among right ones. */
#include "../support/collective.h"
#include "../support/messages.h"

#include <stdlib.h>
#include <string.h>

enum { PARCELS_MAX = 4096 };

/* A list that grows. */
struct list { struct parcel* parcels; int count; };

static struct list empty_list(void) { return (struct list){malloc(PARCELS_MAX * sizeof(struct parcel)), 0}; }

static struct parcel* add(struct list* list, int from, int to, size_t bytes) {
  struct parcel* parcel = &list->parcels[list->count];
  *parcel = (struct parcel){.from = from, .to = to, .bytes = bytes, .type = ncclUint8,
                            .key = (uint64_t)list->count * 65536 + (uint64_t)(from * 256 + to)};
  list->count++;
  return parcel;
}

static void run(struct rank* self, ncclComm_t communicator, struct list* list) {
  exchange_whole(self, communicator, list->parcels, list->count);
  free(list->parcels);
}

/* Every rank to every rank: equal sizes, then sizes that differ for each pair. */
static void all_to_all(struct rank* self, ncclComm_t communicator) {
  const size_t sizes[] = {1, 1000, 65536, 1 << 20};
  for (size_t size = 0; size < sizeof sizes / sizeof *sizes; size++) {
    for (int varied = 0; varied < 2; varied++) {
      struct list list = empty_list();
      for (int from = 0; from < self->ranks; from++) {
        for (int to = 0; to < self->ranks; to++) {
          size_t part = (size_t)((from * 5 + to * 3) % 7);
          add(&list, from, to, varied ? sizes[size] * part / 3 + part : sizes[size]);
        }
      }
      run(self, communicator, &list);
    }
  }
}

/* One rank receives from all, then sends to all; each rank in turn. */
static void gather_and_scatter(struct rank* self, ncclComm_t communicator) {
  for (int root = 0; root < self->ranks; root++) {
    struct list gather = empty_list(), scatter = empty_list();
    for (int rank = 0; rank < self->ranks; rank++) {
      add(&gather, rank, root, 30011 + (size_t)rank * 7000);
      add(&scatter, root, rank, 200003 - (size_t)rank * 9000);
    }
    run(self, communicator, &gather);
    run(self, communicator, &scatter);
  }
}

/* For each dimension of the hypercube an exchange with the neighbour, each in a group of its own. */
static void hypercube(struct rank* self, ncclComm_t communicator) {
  for (int distance = 1; distance < self->ranks; distance *= 2) {
    struct list list = empty_list();
    for (int rank = 0; rank < self->ranks; rank++) {
      if ((rank ^ distance) < self->ranks) add(&list, rank, rank ^ distance, (size_t)distance * 123457);
    }
    run(self, communicator, &list);
  }
}

/* Several messages of each pair of neighbours in one group, small and large ones in turn, arrive in order. */
static void several_a_pair(struct rank* self, ncclComm_t communicator) {
  struct list list = empty_list();
  for (int i = 0; i < 9; i++) {
    for (int rank = 0; rank < self->ranks; rank++) {
      size_t bytes = i % 3 == 0 ? 13 : i % 3 == 1 ? 70001 : (size_t)(on_gpus() ? 5 : 1) << 20;
      add(&list, rank, (rank + 1) % self->ranks, bytes);
      add(&list, (rank + 1) % self->ranks, rank, bytes + 1);
    }
  }
  run(self, communicator, &list);
}

/* More operations in one group than fit any list of fixed length. */
static void hundreds(struct rank* self, ncclComm_t communicator) {
  const int totals[] = {300, 2000};
  for (int which = 0; which < 2; which++) {
    struct random random = random_from(900 + (uint64_t)which);
    struct list list = empty_list();
    /* Every rank sends and receives about equally often. */
    for (int i = 0; i < totals[which] * self->ranks / 2; i++) {
      int from = i % self->ranks, to = (from + 1 + (int)random_below(&random, (uint64_t)self->ranks - 1)) % self->ranks;
      size_t bytes = random_below(&random, 30) ? random_below(&random, 3000) : random_below(&random, 60000);
      if (list.count < PARCELS_MAX) add(&list, from, to, bytes);
    }
    run(self, communicator, &list);
  }
}

/* Only messages of zero bytes; some among others; a message between two ranks alone. */
static void zeros(struct rank* self, ncclComm_t communicator) {
  for (int mix = 0; mix < 3; mix++) {
    struct list list = empty_list();
    for (int from = 0; from < self->ranks; from++) {
      for (int to = 0; to < self->ranks; to++) {
        if (mix == 2 && from > to) continue;
        add(&list, from, to, 0);
        if (mix) add(&list, from, to, (from + to) % 2 ? 0 : 5003);
        if (mix) add(&list, from, to, 0);
      }
    }
    run(self, communicator, &list);
  }
}

/* Messages to oneself: alone, several, of zero bytes, before, after and between messages to others. */
static void to_oneself(struct rank* self, ncclComm_t communicator) {
  for (int mix = 0; mix < 5; mix++) {
    struct list list = empty_list();
    for (int rank = 0; rank < self->ranks; rank++) {
      int next = (rank + 1) % self->ranks;
      if (mix >= 2) add(&list, rank, next, 40009);
      add(&list, rank, rank, mix == 1 ? 0 : 1000003);
      if (mix == 3) continue;
      add(&list, rank, rank, 17);
      if (mix >= 2) add(&list, next, rank, 70);
      if (mix == 4) add(&list, rank, rank, 300000);
    }
    run(self, communicator, &list);
  }
}

static void every_type(struct rank* self, ncclComm_t communicator) {
  ncclDataType_t types[TYPES_MAX];
  int count = known_types(types);
  struct list list = empty_list();
  for (int i = 0; i < count; i++) {
    for (int rank = 0; rank < self->ranks; rank++) {
      size_t bytes = element_bytes(types[i]);
      add(&list, rank, (rank + 1) % self->ranks, bytes * (size_t)(1001 + i))->type = types[i];
      add(&list, rank, rank, bytes * 3)->type = types[i];
    }
  }
  run(self, communicator, &list);
}

/* Buffers at every alignment, different on the two sides; short messages, and messages long enough for every way to move them. */
static void every_alignment(struct rank* self, ncclComm_t communicator) {
  const size_t sizes[] = {1, 15, 16, 17, 119, 120, 121, 1919, 1921, 40000, 1000001};
  for (size_t size = 0; size < sizeof sizes / sizeof *sizes; size++) {
    struct list list = empty_list();
    for (unsigned offset = 0; offset < 16; offset++) {
      for (int rank = 0; rank < self->ranks; rank++) {
        struct parcel* parcel = add(&list, rank, (rank + 1) % self->ranks, sizes[size]);
        parcel->send_offset = offset;
        parcel->receive_offset = (offset * 7 + 3) % 16;
        if (sizes[size] > 100000 && offset % 5) list.count--; /* a part of these is enough */
      }
    }
    run(self, communicator, &list);
  }
}

/* Messages many times as large as the receiver's ring, alone and beside small ones; aligned and not. */
static void large(struct rank* self, ncclComm_t communicator) {
  size_t bytes = (size_t)(on_gpus() ? 64 : 8) << 20;
  for (int odd = 0; odd < 2; odd++) {
    struct list list = empty_list();
    for (int rank = 0; rank < self->ranks; rank++) {
      int next = (rank + 1) % self->ranks;
      if (odd) add(&list, rank, next, 100);
      struct parcel* parcel = add(&list, rank, next, bytes + (size_t)odd * 13);
      parcel->send_offset = odd ? 5 : 0;
      parcel->receive_offset = odd ? 9 : 0;
      if (odd) add(&list, rank, next, 12345);
    }
    run(self, communicator, &list);
  }
}

/* One group over two communicators on two streams, the second communicator's ranks in reverse. */
static void two_communicators(struct rank* self, ncclComm_t first, ncclComm_t second) {
  struct list lists[2] = {empty_list(), empty_list()};
  for (int rank = 0; rank < self->ranks; rank++) {
    add(&lists[0], rank, (rank + 1) % self->ranks, 300007);
    add(&lists[0], rank, rank, 90);
    add(&lists[1], rank, (rank + self->ranks - 1) % self->ranks, 50021);
  }
  CUstream other = new_stream();
  struct exchange one = exchange_prepare(self->rank, lists[0].parcels, lists[0].count);
  struct exchange two = exchange_prepare(self->ranks - 1 - self->rank, lists[1].parcels, lists[1].count);
  NCCL(ncclGroupStart());
  exchange_issue(&two, second, other);
  exchange_issue(&one, first, self->stream);
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  wait_for(other);
  exchange_verify(&one, self);
  exchange_verify(&two, self);
  exchange_release(&one);
  exchange_release(&two);
  for (int i = 0; i < 2; i++) free(lists[i].parcels);
  CUDA(cuStreamDestroy_v2(other));
}

/* Collectives before, between and after the messages of one group, on one communicator. */
static void with_collectives(struct rank* self, ncclComm_t communicator) {
  struct list list = empty_list();
  for (int from = 0; from < self->ranks; from++) {
    for (int to = 0; to < self->ranks; to++) add(&list, from, to, 20011 + (size_t)(from * to) * 1000);
  }
  struct transfer transfers[3];
  const enum collective which[3] = {ALL_REDUCE, ALL_GATHER, BROADCAST};
  for (int i = 0; i < 3; i++) {
    transfers[i] = (struct transfer){.which = which[i], .type = ncclInt32, .op = ncclSum, .count = 4099,
                                     .rank = self->rank, .ranks = self->ranks, .key = 60 + (uint64_t)i};
    transfer_prepare(&transfers[i]);
  }
  struct exchange exchange = exchange_prepare(self->rank, list.parcels, list.count);
  for (int round = 0; round < 2; round++) {
    /* The second time the collectives are outside the group: calls on two paths keep their order. */
    if (round) transfer_launch(&transfers[0], communicator, self->stream);
    NCCL(ncclGroupStart());
    if (!round) transfer_launch(&transfers[0], communicator, self->stream);
    exchange_issue(&exchange, communicator, self->stream);
    if (!round) transfer_launch(&transfers[1], communicator, self->stream);
    if (!round) transfer_launch(&transfers[2], communicator, self->stream);
    NCCL(ncclGroupEnd());
    if (round) transfer_launch(&transfers[1], communicator, self->stream);
    wait_for(self->stream);
    exchange_verify(&exchange, self);
    exchange_renew(&exchange, 1000);
  }
  for (int i = 0; i < 3; i++) {
    transfer_verify(&transfers[i], self);
    transfer_release(&transfers[i]);
  }
  exchange_release(&exchange);
  free(list.parcels);
}

/* What was received on one stream is sent on by the next operation, on another stream and with no event between. NCCL orders a
 * communicator's operations itself, so each block goes round all ranks. */
static void several_streams(struct rank* self, ncclComm_t communicator) {
  enum { STREAMS = 3 };
  const size_t bytes = 300001;
  CUstream streams[STREAMS] = {self->stream, new_stream(), new_stream()};
  int next = (self->rank + 1) % self->ranks, before = (self->rank + self->ranks - 1) % self->ranks;
  struct message buffers[2] = {message_to_send((uint64_t)self->rank, bytes, 0), message_to_receive(0, bytes, 0)};
  int steps = 2 * self->ranks;
  for (int step = 0; step < steps; step++) {
    CUstream stream = streams[step % STREAMS];
    NCCL(ncclGroupStart());
    message_send(&buffers[step % 2], next, communicator, stream);
    message_receive(&buffers[(step + 1) % 2], before, communicator, stream);
    NCCL(ncclGroupEnd());
  }
  for (int i = 0; i < STREAMS; i++) wait_for(streams[i]);
  /* The last block has gone round twice. The other buffer holds what the rank before had then. */
  buffers[steps % 2].key = (uint64_t)self->rank;
  buffers[(steps + 1) % 2].key = (uint64_t)next;
  for (int i = 0; i < 2; i++) {
    message_verify(&buffers[i], self);
    message_release(&buffers[i]);
  }
  for (int i = 1; i < STREAMS; i++) CUDA(cuStreamDestroy_v2(streams[i]));
}

/* Nothing starts before the outermost end: nested groups do not divide it. */
static void nested(struct rank* self, ncclComm_t communicator) {
  struct list lists[3] = {empty_list(), empty_list(), empty_list()};
  struct exchange exchanges[3];
  for (int level = 0; level < 3; level++) {
    for (int rank = 0; rank < self->ranks; rank++) {
      add(&lists[level], rank, (rank + 1 + level) % self->ranks, 8191 * (size_t)(level + 1));
    }
    exchanges[level] = exchange_prepare(self->rank, lists[level].parcels, lists[level].count);
  }
  NCCL(ncclGroupStart());
  exchange_issue(&exchanges[0], communicator, self->stream);
  NCCL(ncclGroupStart());
  NCCL(ncclGroupStart());
  exchange_issue(&exchanges[1], communicator, self->stream);
  NCCL(ncclGroupEnd());
  NCCL(ncclGroupStart());
  NCCL(ncclGroupEnd());
  exchange_issue(&exchanges[2], communicator, self->stream);
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  for (int level = 0; level < 3; level++) exchange_untouched(&exchanges[level]);
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  for (int level = 0; level < 3; level++) {
    exchange_verify(&exchanges[level], self);
    exchange_release(&exchanges[level]);
    free(lists[level].parcels);
  }
}

/* A wrong argument is an error of its call and of the group's end. Nothing of the group runs, and the next group does. */
static void errors(struct rank* self, ncclComm_t communicator) {
  struct list list = empty_list();
  for (int rank = 0; rank < self->ranks; rank++) add(&list, rank, (rank + 1) % self->ranks, 10007);
  struct exchange exchange = exchange_prepare(self->rank, list.parcels, list.count);
  cudaStream_t stream = as_cuda(self->stream);
  void* buffer = device_alloc(64);
  for (int which = 0; which < 5; which++) {
    NCCL(ncclGroupStart());
    if (which % 2 == 0) exchange_issue(&exchange, communicator, self->stream);
    if (which == 0) CODE(ncclSend(buffer, 4, ncclFloat, self->ranks, communicator, stream), ncclInvalidArgument);
    if (which == 1) CODE(ncclRecv(buffer, 4, ncclFloat, -1, communicator, stream), ncclInvalidArgument);
    if (which == 2) CODE(ncclSend(buffer, 4, (ncclDataType_t)99, 0, communicator, stream), ncclInvalidArgument);
    if (which == 3) CODE(ncclRecv(buffer, 4, ncclFloat, 0, NULL, stream), ncclInvalidArgument);
    if (which == 4) {
      NCCL(ncclGroupStart());
      CODE(ncclRecv(buffer, 0, ncclFloat, self->ranks, communicator, stream), ncclInvalidArgument);
      CODE(ncclGroupEnd(), ncclSuccess);
    }
    if (which % 2) exchange_issue(&exchange, communicator, self->stream);
    CODE(ncclGroupEnd(), ncclInvalidArgument);
    wait_for(self->stream);
    meet(self); /* time for what a peer would have run in error */
    exchange_untouched(&exchange);
    meet(self);
    NCCL(ncclGroupStart());
    exchange_issue(&exchange, communicator, self->stream);
    NCCL(ncclGroupEnd());
    wait_for(self->stream);
    exchange_verify(&exchange, self);
    exchange_renew(&exchange, 77);
  }
  device_free(buffer);
  exchange_release(&exchange);
  free(list.parcels);
}

static int wanted_count;
static char** wanted_names;
#define PART(name) if (is_wanted(wanted_count, wanted_names, #name)) name(self, first)

static void all(struct rank* self) {
  ncclComm_t first = world(self, 0), second = NULL;
  ncclUniqueId id = share_id(self, 1, self->ranks - 1);
  NCCL(ncclCommInitRank(&second, self->ranks, id, self->ranks - 1 - self->rank));
  PART(all_to_all);
  PART(gather_and_scatter);
  PART(hypercube);
  PART(several_a_pair);
  PART(hundreds);
  PART(zeros);
  PART(to_oneself);
  PART(every_type);
  PART(every_alignment);
  PART(large);
  if (is_wanted(wanted_count, wanted_names, "two_communicators")) two_communicators(self, first, second);
  PART(with_collectives);
  PART(several_streams);
  PART(nested);
  PART(errors);
  NCCL(ncclCommDestroy(second));
  NCCL(ncclCommDestroy(first));
}

int main(int count, char** arguments) {
  wanted_count = count;
  wanted_names = arguments;
  begin("patterns", 280);
  int ranks = rank_count(4);
  run_ranks("all", PROCESSES, ranks, all, NULL);
  if (ranks > 2) run_ranks("pair", PROCESSES, 2, all, NULL);
  return finish();
}

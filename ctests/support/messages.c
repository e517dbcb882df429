/* Messages between ranks: see messages.h. */
#include "messages.h"

#include <stdlib.h>
#include <string.h>

enum { MARGIN = 64, BESIDE = 0xc5, CLEARED = 0xee };

size_t element_bytes(ncclDataType_t type) {
  switch (type) {
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    case ncclFloat16: case ncclBfloat16: return 2;
    default: return 1;
  }
}

int known_types(ncclDataType_t types[TYPES_MAX]) {
  int version = 0, count = 0;
  NCCL(ncclGetVersion(&version));
  /* 8-bit floats came with 2.24. */
  int numbers = version >= 22400 ? 12 : 10;
  for (; count < numbers; count++) types[count] = (ncclDataType_t)count;
  return count;
}

static uint64_t word_of(uint64_t key, size_t index) {
  uint64_t mixed = key * 0x9e3779b97f4a7c15u + index;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
  return mixed ^ (mixed >> 29);
}

static void fill(unsigned char* to, uint64_t key, size_t bytes) {
  size_t index = 0;
  for (; (index + 1) * 8 <= bytes; index++) {
    uint64_t word = word_of(key, index);
    memcpy(to + index * 8, &word, 8);
  }
  uint64_t word = word_of(key, index);
  memcpy(to + index * 8, &word, bytes - index * 8);
}

static size_t whole_bytes(const struct message* message) {
  return (size_t)(message->at - (char*)message->allocation) + message->bytes + MARGIN;
}

static struct message allocated(uint64_t key, size_t bytes, unsigned offset) {
  struct message message = {NULL, NULL, bytes, key};
  message.allocation = device_alloc(bytes + offset + 2 * MARGIN);
  message.at = (char*)message.allocation + MARGIN + offset;
  device_fill(message.allocation, BESIDE, whole_bytes(&message));
  return message;
}

void message_refill(struct message* message, uint64_t key) {
  unsigned char* host = malloc(message->bytes + 1);
  message->key = key;
  fill(host, key, message->bytes);
  upload(message->at, host, message->bytes);
  CUDA(cuCtxSynchronize()); /* a copy from pageable memory may not have arrived when it returns */
  free(host);
}

void message_clear(struct message* message, uint64_t key) {
  message->key = key;
  device_fill(message->at, CLEARED, message->bytes);
}

struct message message_to_send(uint64_t key, size_t bytes, unsigned offset) {
  struct message message = allocated(key, bytes, offset);
  message_refill(&message, key);
  return message;
}

struct message message_to_receive(uint64_t key, size_t bytes, unsigned offset) {
  struct message message = allocated(key, bytes, offset);
  message_clear(&message, key);
  return message;
}

/* Copies the whole allocation to the host; `wanted` is what it must be outside of the message. */
static unsigned char* seen_of(const struct message* message, unsigned char** wanted) {
  size_t all = whole_bytes(message);
  unsigned char* seen = malloc(all);
  *wanted = malloc(all);
  memset(*wanted, BESIDE, all);
  download(seen, message->allocation, all);
  return seen;
}

static void compare(const struct message* message, unsigned char* seen, unsigned char* wanted) {
  size_t all = whole_bytes(message), first = 0;
  if (!CHECK(memcmp(seen, wanted, all) == 0)) {
    while (seen[first] == wanted[first]) first++;
    fprintf(stderr, "  message %llu of %zu bytes: byte %lld is %02x, not %02x\n", (unsigned long long)message->key,
            message->bytes, (long long)first - (long long)(message->at - (char*)message->allocation), seen[first],
            wanted[first]);
  }
  free(seen);
  free(wanted);
}

void message_verify(const struct message* message, struct rank* self) {
  size_t before = (size_t)(message->at - (char*)message->allocation);
  unsigned char *wanted, *seen = seen_of(message, &wanted);
  fill(wanted + before, message->key, message->bytes);
  uint64_t sum = message->bytes;
  for (size_t i = 0; i < message->bytes; i++) sum = (sum ^ seen[before + i]) * 0x100000001b3u;
  record(self, &sum, sizeof sum);
  compare(message, seen, wanted);
}

void message_untouched(const struct message* message) {
  unsigned char *wanted, *seen = seen_of(message, &wanted);
  memset(wanted + (message->at - (char*)message->allocation), CLEARED, message->bytes);
  compare(message, seen, wanted);
}

void message_release(struct message* message) {
  if (message->allocation) device_free(message->allocation);
  message->allocation = NULL;
}

static void call(const struct message* message, bool sends, ncclDataType_t type, int peer, ncclComm_t communicator,
                 CUstream stream) {
  size_t count = message->bytes / element_bytes(type);
  if (sends) NCCL(ncclSend(message->at, count, type, peer, communicator, as_cuda(stream)));
  else NCCL(ncclRecv(message->at, count, type, peer, communicator, as_cuda(stream)));
}

void message_send(const struct message* message, int peer, ncclComm_t communicator, CUstream stream) {
  call(message, true, ncclUint8, peer, communicator, stream);
}

void message_receive(const struct message* message, int peer, ncclComm_t communicator, CUstream stream) {
  call(message, false, ncclUint8, peer, communicator, stream);
}

struct exchange exchange_prepare(int rank, const struct parcel* parcels, int count) {
  struct exchange exchange = {parcels, count, rank, calloc((size_t)count + 1, sizeof(struct message)),
                              calloc((size_t)count + 1, sizeof(struct message))};
  for (int i = 0; i < count; i++) {
    const struct parcel* parcel = &parcels[i];
    if (parcel->from == rank) exchange.sent[i] = message_to_send(parcel->key, parcel->bytes, parcel->send_offset);
    if (parcel->to == rank) exchange.received[i] = message_to_receive(parcel->key, parcel->bytes, parcel->receive_offset);
  }
  return exchange;
}

void exchange_issue(const struct exchange* exchange, ncclComm_t communicator, CUstream stream) {
  for (int i = 0; i < exchange->count; i++) {
    const struct parcel* parcel = &exchange->parcels[i];
    if (parcel->from == exchange->rank) call(&exchange->sent[i], true, parcel->type, parcel->to, communicator, stream);
    if (parcel->to == exchange->rank)
      call(&exchange->received[i], false, parcel->type, parcel->from, communicator, stream);
  }
}

void exchange_renew(struct exchange* exchange, uint64_t more) {
  for (int i = 0; i < exchange->count; i++) {
    uint64_t key = exchange->parcels[i].key + more;
    if (exchange->sent[i].allocation) message_refill(&exchange->sent[i], key);
    if (exchange->received[i].allocation) message_clear(&exchange->received[i], key);
  }
}

void exchange_verify(const struct exchange* exchange, struct rank* self) {
  for (int i = 0; i < exchange->count; i++) {
    if (exchange->received[i].allocation) message_verify(&exchange->received[i], self);
  }
}

void exchange_untouched(const struct exchange* exchange) {
  for (int i = 0; i < exchange->count; i++) {
    if (exchange->received[i].allocation) message_untouched(&exchange->received[i]);
  }
}

void exchange_release(struct exchange* exchange) {
  for (int i = 0; i < exchange->count; i++) {
    message_release(&exchange->sent[i]);
    message_release(&exchange->received[i]);
  }
  free(exchange->sent);
  free(exchange->received);
}

void exchange_whole(struct rank* self, ncclComm_t communicator, const struct parcel* parcels, int count) {
  struct exchange exchange = exchange_prepare(self->rank, parcels, count);
  NCCL(ncclGroupStart());
  exchange_issue(&exchange, communicator, self->stream);
  NCCL(ncclGroupEnd());
  wait_for(self->stream);
  exchange_verify(&exchange, self);
  exchange_release(&exchange);
}

void acquaint(struct rank* self, ncclComm_t communicator, int own) {
  const struct parcel parcels[2] = {{.from = 0, .to = 1, .bytes = 64, .type = ncclUint8, .key = 1},
                                    {.from = 1, .to = 0, .bytes = 64, .type = ncclUint8, .key = 2}};
  struct rank place = *self;
  place.rank = own;
  exchange_whole(&place, communicator, parcels, 2);
  self->digest = place.digest;
}

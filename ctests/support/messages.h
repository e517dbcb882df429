/* Messages between ranks, from input to verified output: all ranks know a list of parcels, and each sends and receives its own
 * part. Every byte is compared with the one that the sender's key gives, and the bytes around the message with those of before. */
#ifndef WINDLASS_CTESTS_MESSAGES_H
#define WINDLASS_CTESTS_MESSAGES_H

#include "harness.h"

/* A buffer at any alignment in device memory, between bytes that must not change. */
struct message { void* allocation; char* at; size_t bytes; uint64_t key; };

/* A message from one rank to another, both by their numbers in its communicator. */
struct parcel {
  int from, to;
  size_t bytes;                      /* a multiple of the type's size */
  unsigned send_offset, receive_offset; /* of the buffers, from a multiple of 256 */
  ncclDataType_t type;
  uint64_t key; /* chooses the bytes */
};

/* One rank's part of a list of parcels, in the list's order. */
struct exchange {
  const struct parcel* parcels;
  int count, rank;
  struct message *sent, *received; /* one for each parcel; empty for other ranks' parcels */
};

/* Bytes of one element of any of NCCL's types. */
size_t element_bytes(ncclDataType_t type);
enum { TYPES_MAX = 16 };
/* All types that the library has; returns their number. */
int known_types(ncclDataType_t types[TYPES_MAX]);

struct message message_to_send(uint64_t key, size_t bytes, unsigned offset);
struct message message_to_receive(uint64_t key, size_t bytes, unsigned offset);
/* Writes new bytes to send, or expects new ones: the former content is overwritten. */
void message_refill(struct message* message, uint64_t key);
void message_clear(struct message* message, uint64_t key);
/* Compares the bytes and adds them to the rank's digest. */
void message_verify(const struct message* message, struct rank* self);
/* Holds that nothing was written. */
void message_untouched(const struct message* message);
void message_release(struct message* message);
void message_send(const struct message* message, int peer, ncclComm_t communicator, CUstream stream);
void message_receive(const struct message* message, int peer, ncclComm_t communicator, CUstream stream);

/* Allocates and fills the buffers. Waits for all work of the device. */
struct exchange exchange_prepare(int rank, const struct parcel* parcels, int count);
/* Calls sends and receives in the list's order. The caller opens a group if it wants one. */
void exchange_issue(const struct exchange* exchange, ncclComm_t communicator, CUstream stream);
/* Gives every parcel new bytes, those of its key plus `more`. */
void exchange_renew(struct exchange* exchange, uint64_t more);
void exchange_verify(const struct exchange* exchange, struct rank* self);
void exchange_untouched(const struct exchange* exchange);
void exchange_release(struct exchange* exchange);
/* Prepares, runs and verifies all parcels, in one group on the rank's stream. */
void exchange_whole(struct rank* self, ncclComm_t communicator, const struct parcel* parcels, int count);
/* Sends something both ways on a communicator of two ranks. NCCL makes its connections then, which later could wait for the
 * peer. `own` is this rank in it. */
void acquaint(struct rank* self, ncclComm_t communicator, int own);

#endif

/* Messages between ranks, from input to verified output: a list of parcels that all ranks know, of which each sends and
 * receives its own part. Every byte is compared with what the sender's key gives, and the bytes beside it with what was
 * there before. */
#ifndef WINDLASS_CTESTS_MESSAGES_H
#define WINDLASS_CTESTS_MESSAGES_H

#include "harness.h"

/* Device memory at any alignment, between bytes that must stay. */
struct message { void* allocation; char* at; size_t bytes; uint64_t key; };

/* What goes from one rank to another, both ranks of the communicator that it goes through. */
struct parcel {
  int from, to;
  size_t bytes;                      /* a multiple of the type's size */
  unsigned send_offset, receive_offset; /* of the buffers from a multiple of 256 */
  ncclDataType_t type;
  uint64_t key; /* chooses the bytes */
};

/* One rank's part of a list of parcels, in the list's order. */
struct exchange {
  const struct parcel* parcels;
  int count, rank;
  struct message *sent, *received; /* as many as parcels; those of others are empty */
};

/* Bytes of an element of any of NCCL's types. */
size_t element_bytes(ncclDataType_t type);
enum { TYPES_MAX = 16 };
/* All types that the library has, with their number. */
int known_types(ncclDataType_t types[TYPES_MAX]);

struct message message_to_send(uint64_t key, size_t bytes, unsigned offset);
struct message message_to_receive(uint64_t key, size_t bytes, unsigned offset);
/* New bytes to send, or to wait for: what was there is overwritten. */
void message_refill(struct message* message, uint64_t key);
void message_clear(struct message* message, uint64_t key);
/* Compares; adds to the rank's digest. */
void message_verify(const struct message* message, struct rank* self);
/* Holds that nothing arrived. */
void message_untouched(const struct message* message);
void message_release(struct message* message);
void message_send(const struct message* message, int peer, ncclComm_t communicator, CUstream stream);
void message_receive(const struct message* message, int peer, ncclComm_t communicator, CUstream stream);

/* Waits for all work of the device, as allocations and copies do. */
struct exchange exchange_prepare(int rank, const struct parcel* parcels, int count);
/* Calls sends and receives in the list's order; the caller opens a group around them where it means one. */
void exchange_issue(const struct exchange* exchange, ncclComm_t communicator, CUstream stream);
/* Every parcel's bytes anew, with `more` added to its key. */
void exchange_renew(struct exchange* exchange, uint64_t more);
void exchange_verify(const struct exchange* exchange, struct rank* self);
void exchange_untouched(const struct exchange* exchange);
void exchange_release(struct exchange* exchange);
/* All of it, in one group on the rank's stream. */
void exchange_whole(struct rank* self, ncclComm_t communicator, const struct parcel* parcels, int count);
/* Lets both directions of a communicator of two ranks carry something, so that NCCL's connections, which else may wait for
 * the peer, are made; `own` is the rank in it. */
void acquaint(struct rank* self, ncclComm_t communicator, int own);

#endif

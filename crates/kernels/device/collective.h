// What the host side and the kernels of collectives say to each other: C structures, the same bytes in C++, CUDA and Rust
// (crates/kernels/src/collective.rs). README.md "Collectives" is the protocol.
//
// Addresses are 64-bit device-visible ones. Offsets in regions are equal on all ranks. Packets are counted from the init of the
// communicator, so memory that is zeroed at init needs no further preparation.
#pragma once
#include <stddef.h>
#include <stdint.h>

enum {
  WINDLASS_COLLECTIVE_RANKS_MAX = 8,
  // An LL pair is 8 bytes of payload and 8 of tag, stored by one thread; a packet of LL is a warp's 32.
  WINDLASS_LL_PAYLOAD_BYTES = 256,
  WINDLASS_LL_SLOT_BYTES = 512,
  WINDLASS_LL_SLOTS = 2,
  WINDLASS_LL_COUNT_BYTES = 8,
  // Of a batch. Of LL each packet has an entry.
  WINDLASS_BATCH_CALLS_MAX = 64,
  WINDLASS_BATCH_ENTRIES = 512,
  // An LL128 line is 120 bytes of payload and 8 of tag, stored by 8 threads; a packet is one half packet (8 lines, 960 bytes)
  // or two, as the kernel has it. Slots are for two.
  WINDLASS_LL128_HALF_PAYLOAD_BYTES = 960,
  WINDLASS_LL128_SLOT_BYTES = 2048,
  // A Simple packet fills a slot. Its kernels have counters in shared memory.
  WINDLASS_SIMPLE_SHARED_BYTES = 128,
  // The words of a channel of LL128. Numbers of packets, from init.
  WINDLASS_CHANNEL_SENT = 0,      // the next one to send. Written by the warp that sends
  WINDLASS_CHANNEL_PROVEN = 1,    // those below are consumed by all peers for certain. Written by the warp that sends
  WINDLASS_CHANNEL_RECEIVED = 2,  // the next one to receive. Written by the warp that receives
  WINDLASS_CHANNEL_CREDIT = 8,    // one for each rank: those below it says to have consumed. Written by that rank
  WINDLASS_CHANNEL_POSTED = 16,   // one for each rank: those below are there. Written by that rank
  WINDLASS_CHANNEL_BYTES = 256,
};

// WindlassCollectiveLaunch.flags
enum {
  // The next kernel of the stream may be set up while this one runs (programmatic serialization on its side).
  WINDLASS_COLLECTIVE_EARLY_NEXT = 1,
  // All that is sent, and this rank's own part, is one and the same buffer.
  WINDLASS_COLLECTIVE_SAME = 2,
  // Every rank sends every other one as many packets, over LL128: some may be empty.
  WINDLASS_COLLECTIVE_EVEN = 4,
  // Of a scaled sum `scale` is the address of this rank's scalar, not its bits.
  WINDLASS_COLLECTIVE_SCALAR_AT = 8,
  // From this bit on: of a reduce in two phases the root, plus 1.
  WINDLASS_COLLECTIVE_ROOT_SHIFT = 4,
};

// Added to what WindlassP2pReportEntry.waited_for says: the wire of a collective.
enum {
  WINDLASS_WAITED_LL_DATA = 6,
  WINDLASS_WAITED_LL128_CREDIT = 7,  // phase 0, often the only one
  WINDLASS_WAITED_LL128_DATA = 8,
  WINDLASS_WAITED_RESULT_CREDIT = 9,  // phase 1
  WINDLASS_WAITED_RESULT_DATA = 10,
};

// Where a wire lies in every rank's region. Rings: [source][channel][slot]. Channels: [channel], of LL128 WINDLASS_CHANNEL_*, of LL the number of
// launches that have used it.
typedef struct WindlassWire {
  uint64_t rings;
  uint64_t channels;
} WindlassWire;

// The kernels' one parameter. What ranks must have alike: ranks, first_tag, wires, channels_log2, ring_slots, used_channels, packets, the flag EVEN,
// and the bytes of each connection: send_bytes[p] here is receive_bytes[me] on rank p; of a reduction, what every rank contributes to
// a result has as many bytes as the result. Of a reduce in two phases send_bytes are the shares on all ranks, and receive_bytes, too, on the root alone.
typedef struct WindlassCollectiveLaunch {
  uint64_t regions[WINDLASS_COLLECTIVE_RANKS_MAX];  // where the part for collectives of each rank's region begins
  WindlassWire wires[2];                           // the second: of the second phase, if there are two
  uint64_t control;                                // address of the abort word (32 bits), in any device-visible memory
  uint64_t report;                                 // address of a WindlassP2pReport in device memory, or 0
  uint64_t first_tag;                              // tag of packet 0 of every channel; 0 is no tag
  uint64_t send[WINDLASS_COLLECTIVE_RANKS_MAX];    // what goes to each rank; of this rank: its own part
  uint64_t send_bytes[WINDLASS_COLLECTIVE_RANKS_MAX];
  uint64_t receive[WINDLASS_COLLECTIVE_RANKS_MAX];        // where it comes to; of a reduction only this rank's, the result
  uint64_t receive_bytes[WINDLASS_COLLECTIVE_RANKS_MAX];
  uint32_t rank;
  uint32_t ranks;
  uint32_t channels_log2;  // of the channels that each wire's rings have
  uint32_t ring_slots;     // packets that a channel's ring holds; a power of two, at least 2
  uint32_t used_channels;  // no more than the rings' channels, nor than the packets of the largest connection: packet u goes by channel u modulo this
  uint32_t role_warps;     // warps of a block for each role
  uint32_t reduction;      // NCCL's type | NCCL's operation, or 5, the scaled sum, << 8; kernels for one reduction do not look at it
  uint32_t flags;          // WINDLASS_COLLECTIVE_*
  uint64_t packets;        // of the largest connection
  uint64_t scale;          // average: bits of the float (double: of the double) that elements are multiplied by; of integers, the ranks.
                           // Scaled sum: bits, or address, of this rank's scalar, of the elements' type. Peers may have others
} WindlassCollectiveLaunch;

// One of several collectives that one kernel runs, each as it would be alone over the same wire. Ranks must have `bytes` and `first_packet`
// alike.
typedef struct WindlassBatchCall {
  uint64_t send;          // what goes to rank 0
  uint64_t receive;       // where rank 0's comes to; of a reduction the result
  uint32_t send_step;     // from what goes to one rank to what goes to the next; 0: the same goes to all
  uint32_t receive_step;  // from where one rank's comes to to where the next one's does
  uint32_t bytes;         // of every connection; of an all-reduce in two phases all, shares of which lie a step apart
  uint32_t first_packet;  // packets of those before
} WindlassBatchCall;

// The one parameter of the kernels of batches. Of `launch` buffers and their bytes are not looked at; `packets` are those of all calls.
// What ranks must have alike is what they must of a single one, and the calls' order.
typedef struct WindlassBatchLaunch {
  WindlassCollectiveLaunch launch;
  WindlassBatchCall calls[WINDLASS_BATCH_CALLS_MAX];
  uint8_t call_of_packet[WINDLASS_BATCH_ENTRIES];  // for each 1 << packets_log2 packets the first one's call
  uint32_t packets_log2;                           // of LL 0
  uint32_t count;                                  // of calls
} WindlassBatchLaunch;

#if defined(__cplusplus)
static_assert(sizeof(WindlassBatchCall) == 32 && offsetof(WindlassBatchCall, bytes) == 24, "batch");
static_assert(sizeof(WindlassBatchLaunch) == 424 + 2048 + 512 + 8 && offsetof(WindlassBatchLaunch, calls) == 424, "batch");
static_assert(sizeof(WindlassWire) == 16, "wire");
static_assert(offsetof(WindlassCollectiveLaunch, wires) == 64 && offsetof(WindlassCollectiveLaunch, control) == 96, "launch");
static_assert(offsetof(WindlassCollectiveLaunch, send) == 120 && offsetof(WindlassCollectiveLaunch, rank) == 376, "launch");
static_assert(sizeof(WindlassCollectiveLaunch) == 424, "launch");
#endif

// C structures that the host and the kernels of collectives share, the same bytes in C++, CUDA and Rust
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
  // A ring of one-shot has room for so many launches. Its counts are as those of LL.
  WINDLASS_ONE_SHOT_LAUNCHES = 2,
  // Limits of a batch: its calls, and the entries of call_of_packet. Over LL each packet has an entry.
  WINDLASS_BATCH_CALLS_MAX = 64,
  WINDLASS_BATCH_ENTRIES = 512,
  // An LL128 line is 120 bytes of payload and 8 of tag, stored by 8 threads; a packet is one half packet (8 lines, 960 bytes)
  // or two, as the kernel has it. Slots are for two.
  WINDLASS_LL128_HALF_PAYLOAD_BYTES = 960,
  WINDLASS_LL128_SLOT_BYTES = 2048,
  // Shared memory for the counters of Simple's kernels. A Simple packet fills a slot.
  WINDLASS_SIMPLE_SHARED_BYTES = 128,
  // Indices of the words of a channel of LL128 or Simple. The words are numbers of packets, from init.
  WINDLASS_CHANNEL_SENT = 0,      // the next one to send. Written by the warp that sends (Simple: by the signal warp)
  WINDLASS_CHANNEL_PROVEN = 1,    // those below are consumed by all peers for certain. Written by the same warp
  WINDLASS_CHANNEL_RECEIVED = 2,  // the next one to receive. Written by the warp that receives
  WINDLASS_CHANNEL_CREDIT = 8,    // one for each rank: that rank has consumed those below. Written by that rank
  WINDLASS_CHANNEL_POSTED = 16,   // one for each rank, of Simple: that rank's packets below are there. Written by that rank
  WINDLASS_CHANNEL_BYTES = 256,
};

// WindlassCollectiveLaunch.flags
enum {
  // The next kernel of the stream may be set up while this one runs (programmatic serialization on its side).
  WINDLASS_COLLECTIVE_EARLY_NEXT = 1,
  // All ranks are sent the same buffer, which is also this rank's own part.
  WINDLASS_COLLECTIVE_SAME = 2,
  // Every rank sends every other one as many packets, over LL128 or Simple: some may be empty.
  WINDLASS_COLLECTIVE_EVEN = 4,
  // For a scaled sum, `scale` is the address of this rank's scalar, not its bits.
  WINDLASS_COLLECTIVE_SCALAR_AT = 8,
  // From this bit on: 1 + the root of a reduce in two phases, else 0.
  WINDLASS_COLLECTIVE_ROOT_SHIFT = 4,
};

// More values of WindlassP2pReportEntry.waited_for, for collectives.
enum {
  WINDLASS_WAITED_LL_DATA = 6,
  WINDLASS_WAITED_LL128_CREDIT = 7,  // phase 0, often the only one
  WINDLASS_WAITED_LL128_DATA = 8,
  WINDLASS_WAITED_RESULT_CREDIT = 9,  // phase 1
  WINDLASS_WAITED_RESULT_DATA = 10,
  WINDLASS_WAITED_ONE_SHOT_DATA = 11,
};

// Where a wire lies in every rank's region. Rings: [source, without the rank itself][channel][slot], of one-shot [source][launch mod 2][packet].
// Channels: [channel], of LL128 WINDLASS_CHANNEL_*, of LL and one-shot the number of launches that have used it.
typedef struct WindlassWire {
  uint64_t rings;
  uint64_t channels;
} WindlassWire;

// The kernels' one parameter. Equal on all ranks: ranks, first_tag, wires, channels_log2, ring_slots, used_channels, packets, the flag EVEN.
// Sizes must match: send_bytes[p] here is receive_bytes[me] on rank p; in a reduction every rank's contribution to a result has the result's
// size. In a reduce in two phases send_bytes are the shares, on all ranks; receive_bytes are the shares on the root alone.
typedef struct WindlassCollectiveLaunch {
  uint64_t regions[WINDLASS_COLLECTIVE_RANKS_MAX];  // where the part for collectives of each rank's region begins
  WindlassWire wires[2];                           // the second: of the second phase, if there are two
  uint64_t control;                                // address of the abort word (32 bits), in any device-visible memory
  uint64_t report;                                 // address of a WindlassP2pReport in device memory, or 0
  uint64_t first_tag;                              // tag of packet 0 of every channel; 0 is no tag
  uint64_t send[WINDLASS_COLLECTIVE_RANKS_MAX];    // address of what goes to each rank; for this rank: its own part
  uint64_t send_bytes[WINDLASS_COLLECTIVE_RANKS_MAX];
  uint64_t receive[WINDLASS_COLLECTIVE_RANKS_MAX];        // address for what comes from each rank; a reduction in one phase uses this rank's only
  uint64_t receive_bytes[WINDLASS_COLLECTIVE_RANKS_MAX];
  uint32_t rank;
  uint32_t ranks;
  uint32_t channels_log2;  // of the channels that each wire's rings have
  uint32_t ring_slots;     // packets that a channel's ring holds; a power of two, at least 2. One-shot: packets of a launch that a ring holds
  uint32_t used_channels;  // no more than the rings' channels, nor than the packets of the largest connection: packet u goes by channel u modulo this
  uint32_t role_warps;     // warps of a block for each role
  uint32_t reduction;      // NCCL's type | NCCL's operation, or 5, the scaled sum, << 8; kernels for one reduction do not look at it
  uint32_t flags;          // WINDLASS_COLLECTIVE_*
  uint64_t packets;        // of the largest connection
  uint64_t scale;          // average: bits of the float (double: of the double) that elements are multiplied by.
                           // Scaled sum: bits, or address, of this rank's scalar, of the elements' type. Peers may have others
} WindlassCollectiveLaunch;

// One collective of a batch. It runs as it would alone over the same wire. `bytes` and `first_packet` are equal on all ranks.
typedef struct WindlassBatchCall {
  uint64_t send;          // address of what goes to rank 0
  uint64_t receive;       // address for what comes from rank 0; of a reduction: of the result
  uint32_t send_step;     // bytes from one rank's part in `send` to the next one's; 0: the same goes to all
  uint32_t receive_step;  // bytes from one rank's place in `receive` to the next one's
  uint32_t bytes;         // of every connection; of an all-reduce in two phases: of the whole buffer, whose shares lie a step apart
  uint32_t first_packet;  // packets of the calls before this one
} WindlassBatchCall;

// The one parameter of the kernels of batches. Buffers and their bytes in `launch` have no effect; its `packets` are those of all calls.
// Equal on all ranks: what must be equal for a single collective, and the order of the calls.
typedef struct WindlassBatchLaunch {
  WindlassCollectiveLaunch launch;
  WindlassBatchCall calls[WINDLASS_BATCH_CALLS_MAX];
  uint8_t call_of_packet[WINDLASS_BATCH_ENTRIES];  // for each 1 << packets_log2 packets the first one's call
  uint32_t packets_log2;                           // 0 for LL
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

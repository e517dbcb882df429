// C structures that the host and the p2p transport kernel share, the same bytes in C++, CUDA and Rust
// (crates/kernels/src/launch.rs). Sizes and offsets are asserted at the end of this file and in Rust.
//
// All addresses are 64-bit device-visible addresses. All counts of packets and chunks are counted from the init of the
// communicator, so memory that is zeroed at init needs no further preparation.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define WINDLASS_P2P_KERNEL "ncclWindlassMail"

enum {
  // A line is 128 bytes: 120 of payload, 8 of tag. A packet is what one warp moves at once: 16 lines.
  WINDLASS_LINE_BYTES = 128,
  WINDLASS_LINES_PER_PACKET = 16,
  WINDLASS_PACKET_SLOT_BYTES = 2048,
  WINDLASS_PACKET_PAYLOAD_BYTES = 1920,
  // Half a packet (8 lines) is the least that goes over the wire.
  WINDLASS_HALF_PACKET_PAYLOAD_BYTES = 960,
  // Distance between the credit words of neighbouring LL128 channels, and between the words of neighbouring bulk channels:
  // words that different warps write over the link do not share a sector.
  WINDLASS_LL128_WORD_STRIDE = 32,
  WINDLASS_BULK_WORD_STRIDE = 128,
  // Distance between a side's own words of neighbouring channels: the count, then the ring into which the channel has
  // moved, or 0. One load reads both.
  WINDLASS_PROGRESS_STRIDE = 16,
  // Distance between the words by which senders of LL128 channels say from which packet on the grown ring is used.
  WINDLASS_LL128_FROM_STRIDE = 8,
  WINDLASS_LAUNCH_BYTES = 4096,
  WINDLASS_LAUNCH_HEAD_BYTES = 120,
  WINDLASS_INLINE_BYTES = WINDLASS_LAUNCH_BYTES - WINDLASS_LAUNCH_HEAD_BYTES,
  WINDLASS_REPORT_ENTRIES = 31,
  // Warps before the copy warps in a launch that moves bulk messages: the TMA producer and the signal warp.
  WINDLASS_BULK_SERVICE_WARPS = 2,
  // Bytes of each wire at `growth_requests`: one for each peer, by its rank modulo this number.
  WINDLASS_GROWTH_REQUESTS_PER_WIRE = 64,
  // Virtual blocks of a communicator at most: `used_blocks` has a bit for each.
  WINDLASS_VIRTUAL_BLOCKS_MAX = 32,
  // A message by LL128 goes over so few virtual blocks that each has about this many of its packets.
  WINDLASS_PACKETS_A_BLOCK = 8,
};

// In a posted word: the channel moves, or has moved, into its grown ring; the word after it says from which chunk on.
#define WINDLASS_POSTED_MOVES (1ull << 63)
// Words at WindlassP2pConnection.growth.
enum { WINDLASS_GROWTH_LL128 = 0, WINDLASS_GROWTH_BULK = 1 };

// WindlassP2pConnection.flags
enum {
  WINDLASS_CONNECTION_RECEIVE = 1,
  // Bulk messages of this connection are sent by ordinary loads and stores: the architecture lacks bulk copies, or a
  // buffer is not 16-byte aligned. The receiver cannot tell.
  WINDLASS_CONNECTION_ORDINARY_STORES = 2,
};

// WindlassP2pLaunch.flags
enum {
  // The next kernel of the stream may be set up while this one runs (programmatic serialization on its side).
  WINDLASS_LAUNCH_EARLY_NEXT = 1,
  // Some connection has a grown bulk ring: bulk channels that have not moved look for it when the launch begins.
  WINDLASS_LAUNCH_BULK_GREW = 2,
};

// The word at `control`. On ASK, a warp that waits for a peer reports that and leaves.
enum { WINDLASS_CONTROL_RUN = 0, WINDLASS_CONTROL_ABORT = 1, WINDLASS_CONTROL_ASK = 2 };

// WindlassP2pReportEntry.waited_for
enum {
  WINDLASS_WAITED_P2P_LL128_CREDIT = 1,  // a sender, for room in an LL128 channel
  WINDLASS_WAITED_P2P_LL128_DATA = 2,    // a receiver, for a packet
  WINDLASS_WAITED_BULK_CREDIT = 3,       // a sender, for room in a bulk channel
  WINDLASS_WAITED_BULK_DATA = 4,         // a receiver, for a chunk
};

// What the ranks of a communicator agreed on at its init; equal on all of them, constant for its life.
typedef struct WindlassP2pGeometry {
  uint64_t first_tag;         // tag of the first packet of every LL128 channel; tags grow by one a packet; 0 is no tag
  uint64_t bulk_from_bytes;   // messages of at least this many bytes go by bulk channels, shorter ones by LL128 channels
  uint32_t ll128_channels;    // LL128 channels of a connection; a multiple of bulk_channels
  uint32_t ll128_slots;       // packets that an LL128 channel's ring holds; a power of two
  uint32_t bulk_channels;     // bulk channels of a connection, and virtual blocks: 1 to 32
  uint32_t bulk_slots;        // chunks that a bulk channel's ring holds; a power of two
  uint32_t bulk_chunk_bytes;  // a multiple of 128
  uint32_t rank;              // own rank; for the report only
} WindlassP2pGeometry;

// One message. Messages of a connection stand in the order in which they were called.
typedef struct WindlassP2pOperation {
  uint64_t address;  // any alignment
  uint64_t bytes;    // of the message; from bit WINDLASS_BLOCKS_SHIFT on: number of virtual blocks over which it goes by LL128; 0: by chunks
} WindlassP2pOperation;
#define WINDLASS_BLOCKS_SHIFT 56

// All of a group's messages to one peer, or from one. "Mine" is this rank's memory, "the peer's" is mapped.
typedef struct WindlassP2pConnection {
  uint64_t ll128_ring;      // send: the peer's; receive: mine. [channel][slot][2048 bytes]
  uint64_t ll128_credit;    // packets consumed, written by the receiver. send: mine; receive: the peer's. [channel], stride 32
  uint64_t ll128_progress;  // packets done by this side, ring. mine. [channel], stride 16
  uint64_t ll128_from;      // 1 + the first packet in the grown ring, or 0. send: the peer's; receive: mine. [channel], stride 8
  uint64_t bulk_ring;       // send: the peer's; receive: mine. [channel][slot][chunk]
  uint64_t bulk_posted;     // chunks arrived, and 1 + the first chunk in the grown ring, or 0, written by the sender.
                            // send: the peer's; receive: mine. [channel], stride 128
  uint64_t bulk_credit;     // chunks consumed, written by the receiver. send: mine; receive: the peer's. [channel], stride 128
  uint64_t bulk_progress;   // chunks done by this side, ring. mine. [channel], stride 16
  uint64_t growth;          // two words for the larger rings, of LL128 and of chunks; 0 until there is one (growth.cuh). In host
                            // memory, written by this side's host. Sends: the peer's ring; receives: mine
  uint32_t peer;            // rank; for the report only
  uint16_t flags;           // WINDLASS_CONNECTION_*
  uint16_t first_block;     // the virtual block that serves channel 0 of both wires; equal on both sides
  uint32_t first_operation;
  uint32_t operations;
  uint16_t active_ll128_blocks;   // the group's messages use LL128 channels of so many virtual blocks, from the first one on,
  uint16_t active_ll128_rounds;   // and of each so many
  uint32_t active_bulk_channels;  // and bulk channels 0 .. active - 1
} WindlassP2pConnection;

// The kernel's one parameter. The storage holds the connections (sends, then receives), then, unless a list is given, the
// operations and the copies: of each copy its destination, then its source. A launch may hand over only the used part:
// WINDLASS_LAUNCH_HEAD_BYTES + the used storage.
typedef struct WindlassP2pLaunch {
  WindlassP2pGeometry geometry;
  uint64_t control;         // address of the abort word (32 bits), in any device-visible memory
  uint64_t report;          // address of a WindlassP2pReport in device memory
  uint64_t operation_list;  // address of a list in device-visible memory, or 0: the operations are in the storage
  uint64_t growth_requests;          // address of bytes that senders without room set to 1, or 0. [wire][peer modulo 64]
  uint32_t send_connections;
  uint32_t receive_connections;
  uint32_t used_blocks;          // bit b: virtual block b serves a channel. The grid begins with these, ascending
  uint32_t bulk_tasks;           // bulk channels of one block at most, both ways; 0: no chunks
  uint32_t ll128_send_warps;     // copy warps of a block that send LL128: its first ones
  uint32_t ll128_receive_warps;  // copy warps of a block that receive LL128: its last ones
  uint32_t copy_warps;           // warps of a block that move data; all of them move bulk messages
  uint16_t stages;               // chunks that the TMA producer holds in shared memory, even; 0: no TMA producer
  uint16_t copy_blocks;          // blocks that copy what the rank sends to itself: the last ones of the grid
  uint16_t jobs_per_warp;        // room in shared memory for a copy warp's jobs; 0: each has at most one, an LL128 channel
  uint16_t ll128_rounds;         // LL128 channels of a connection that one virtual block serves
  uint32_t flags;                // WINDLASS_LAUNCH_*
  uint32_t operations;           // of all connections
  uint32_t copies;
  uint64_t storage[WINDLASS_INLINE_BYTES / 8];
} WindlassP2pLaunch;

// What a warp waited for when it saw the abort word.
typedef struct WindlassP2pReportEntry {
  uint32_t peer;
  uint32_t waited_for;  // WINDLASS_WAITED_*
  uint32_t channel;
  uint32_t operation;  // index in the connection's messages
  uint64_t sequence;   // packet or chunk of the channel, counted from init
  uint64_t seen;       // the last count read of what it waits for (credit or posted word)
} WindlassP2pReportEntry;

typedef struct WindlassP2pReport {
  uint32_t claimed;  // entries asked for; more than WINDLASS_REPORT_ENTRIES: the rest was dropped
  uint32_t rank;
  uint64_t reserved[3];
  WindlassP2pReportEntry entries[WINDLASS_REPORT_ENTRIES];
} WindlassP2pReport;

// Shared memory of a block that moves messages: the byte offset of each part, and their total.
typedef struct WindlassP2pShared {
  uint32_t stages;    // [stage][chunk]
  uint32_t barriers;  // [stage], 8 bytes
  uint32_t orders;    // [stage], 16 bytes
  uint32_t tasks;     // [bulk channels of the block, sends first], 64 bytes
  uint32_t told;      // [task][copy warp], 4 bytes
  uint32_t jobs;      // [copy warp][job], 64 bytes
  uint32_t total;
} WindlassP2pShared;

#if defined(__CUDACC__)
#define WINDLASS_ANYWHERE __host__ __device__ __forceinline__
#else
#define WINDLASS_ANYWHERE inline
#endif
#if defined(__cplusplus)
WINDLASS_ANYWHERE WindlassP2pShared windlass_shared_layout(const WindlassP2pLaunch& launch) {
  WindlassP2pShared shared;
  shared.stages = 0;
  shared.barriers = shared.stages + launch.stages * launch.geometry.bulk_chunk_bytes;
  shared.orders = shared.barriers + (launch.stages * 8 + 15) / 16 * 16;
  shared.tasks = shared.orders + launch.stages * 16;
  shared.told = shared.tasks + launch.bulk_tasks * 64;
  shared.jobs = shared.told + (launch.bulk_tasks * launch.copy_warps * 4 + 15) / 16 * 16;
  shared.total = shared.jobs + launch.copy_warps * launch.jobs_per_warp * 64;
  return shared;
}

static_assert(sizeof(WindlassP2pGeometry) == 40 && offsetof(WindlassP2pGeometry, ll128_channels) == 16, "geometry");
static_assert(sizeof(WindlassP2pOperation) == 16, "operation");
static_assert(sizeof(WindlassP2pConnection) == 96 && offsetof(WindlassP2pConnection, peer) == 72, "connection");
static_assert(sizeof(WindlassP2pLaunch) == WINDLASS_LAUNCH_BYTES, "launch");
static_assert(offsetof(WindlassP2pLaunch, control) == 40 && offsetof(WindlassP2pLaunch, used_blocks) == 80, "launch");
static_assert(offsetof(WindlassP2pLaunch, storage) == WINDLASS_LAUNCH_HEAD_BYTES, "launch");
static_assert(sizeof(WindlassP2pReportEntry) == 32 && sizeof(WindlassP2pReport) == 32 + 31 * 32, "report");
#endif

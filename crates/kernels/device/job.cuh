// A job: one channel of one connection that a warp serves, and how far it is. A job's step never waits: it moves one packet or
// chunk, or says that it cannot yet. So a warp can take several jobs in turn, and none holds up another.
#pragma once
#include "growth.cuh"
#include "report.cuh"
#include "vectors.cuh"

enum JobKind : uint8_t { job_ll128_send, job_ll128_receive, job_bulk_send, job_bulk_receive };

// Kept in registers by a warp with one job, else in shared memory, read and written by the warp as a whole.
struct alignas(16) Job {
  uint64_t count;      // the next packet or chunk of this channel, from init
  uint64_t seen;       // the last count read of credit (sender) or of the posted word (receiver of bulk)
  uint64_t from;       // the first packet or chunk in the grown ring; 0: moved before this launch; from_none: no move is known
  uint64_t grown;      // the word of the grown ring (growth.cuh), or 0
  uint64_t slots;      // LL128: where the channel's slots begin, in the ring in which the next packet lies
  uint32_t slot_mask;  // LL128: their number less one
  uint32_t operation;  // the message at which the job is, in its connection
  uint32_t step;       // how many packets or chunks of that message this channel has moved
  uint16_t connection;
  uint16_t channel;
  union {
    uint16_t task;   // bulk: which of the block's bulk channels
    uint16_t round;  // LL128: which of the block's LL128 channels of its connection
  };
  JobKind kind;
  uint8_t live;        // anything left to do
};
static_assert(sizeof(Job) == 64, "WindlassP2pShared.jobs counts 64 bytes a job");

// A buffer that is sent, received or copied.
struct Message {
  uint64_t address;
  uint64_t bytes;
  uint32_t blocks;  // virtual blocks over which it goes by LL128, from its connection's first on; 0: by chunks
};

// The launch as a thread reads it. Parameters come from the constant bank.
struct Group {
  const WindlassP2pLaunch& launch;
  // The virtual block that this thread block serves.
  const uint32_t block;

  WINDLASS_DEVICE const WindlassP2pGeometry& geometry() const { return launch.geometry; }
  WINDLASS_DEVICE uint32_t connections() const { return launch.send_connections + launch.receive_connections; }
  WINDLASS_DEVICE WindlassP2pConnection connection(uint32_t index) const {
    return reinterpret_cast<const WindlassP2pConnection*>(launch.storage)[index];
  }
  WINDLASS_DEVICE Message message(uint32_t index) const {
    // Two loads, as the second one is from the constant bank.
    if (launch.operation_list) return read(reinterpret_cast<const uint64_t*>(launch.operation_list) + index * 2);
    return read(launch.storage + connections() * (uint32_t)(sizeof(WindlassP2pConnection) / 8) + index * 2);
  }
  WINDLASS_DEVICE static Message read(const uint64_t* at) {
    const uint64_t bytes = at[1];
    return Message{at[0], bytes & ((1ull << WINDLASS_BLOCKS_SHIFT) - 1), (uint32_t)(bytes >> WINDLASS_BLOCKS_SHIFT)};
  }
  WINDLASS_DEVICE bool aborted() const { return load_control(launch.control) != WINDLASS_CONTROL_RUN; }
  // For a warp that waits for warps of its own kernel alone: it has nothing to report, so only an abort ends it.
  WINDLASS_DEVICE bool ended() const { return load_control(launch.control) == WINDLASS_CONTROL_ABORT; }
};

// The virtual block that block `index` of the grid serves: the grid begins with the used virtual blocks, ascending. no_block: the
// block only fills up a cluster. Called by the whole warp.
constexpr uint32_t no_block = ~0u;
WINDLASS_DEVICE uint32_t virtual_block(uint32_t used, uint32_t index) {
  const uint32_t candidate = lane_index();
  const bool is_it = used >> candidate & 1 && bits_set(used & ((1u << candidate) - 1)) == index;
  return first_bit(ballot_of_warp(is_it));
}

// Returns b, how many virtual blocks this one lies behind the connection's first. Channel l is served by virtual block (first_block + l) modulo
// their number V. That follows from the pair of ranks and the channel alone, so it is the same on both sides, whatever else their groups hold.
// So each block serves at most bulk channel b of a connection, and LL128 channel b + V * round for each round.
WINDLASS_DEVICE uint32_t blocks_behind(const Group& group, const WindlassP2pConnection& connection) {
  const uint32_t behind = group.block - connection.first_block;
  return group.block < connection.first_block ? behind + group.geometry().bulk_channels : behind;
}

// A piece of a message: what one packet or one chunk carries.
struct Piece {
  uint64_t address;  // of the message
  uint64_t offset;   // of the piece in it
  uint32_t bytes;    // of the piece
};

// Finds the piece at (operation, step), or the next one that this channel carries: a function of bytes and geometry, equal on both sides.
// Bulk channel l of n carries chunks l, l + n, l + 2n ... LL128 channel b + V * round carries, of a message that goes over B blocks, packets
// b + B * round and every (B * rounds)-th after it: neighbouring packets lie in neighbouring blocks, which is quicker than in one.
// False: the connection has no more pieces for this channel.
WINDLASS_DEVICE bool find_piece(const Group& group, const WindlassP2pConnection& connection, bool bulk, uint32_t channel, uint32_t round,
                            uint32_t& operation, uint32_t& step, Piece& piece) {
  const uint32_t behind = bulk ? channel : channel - round * group.geometry().bulk_channels;
  const uint32_t turn = bulk ? step : round + step * group.launch.ll128_rounds;
  const uint32_t size = bulk ? group.geometry().bulk_chunk_bytes : (uint32_t)WINDLASS_PACKET_PAYLOAD_BYTES;
  for (uint32_t here = turn; operation < connection.operations; here = round) {
    const Message message = group.message(connection.first_operation + operation);
    const uint32_t blocks = bulk ? group.geometry().bulk_channels : message.blocks;
    const uint64_t offset = (uint64_t)(behind + here * blocks) * size;
    if (bulk ? message.blocks == 0 && offset < message.bytes : behind < blocks && offset < message.bytes) {
      piece.address = message.address;
      piece.offset = offset;
      piece.bytes = (uint32_t)(message.bytes - offset < size ? message.bytes - offset : size);
      return true;
    }
    ++operation;
    step = 0;
  }
  return false;
}

// Asks the host for a larger ring. The host may read the byte at any time, so no access is ordered with it. Called by one thread.
WINDLASS_DEVICE void request_growth(const Group& group, uint32_t peer, uint32_t wire) {
  if (group.launch.growth_requests)
    set_byte(group.launch.growth_requests + wire * WINDLASS_GROWTH_REQUESTS_PER_WIRE + peer % WINDLASS_GROWTH_REQUESTS_PER_WIRE);
}

// Reports what a warp waited for. Called by one thread.
WINDLASS_DEVICE void report_wait(const Group& group, uint32_t peer, uint32_t waited_for, uint32_t channel, uint32_t operation,
                             uint64_t sequence, uint64_t seen) {
  report_entry(group.launch.report, group.geometry().rank,
               WindlassP2pReportEntry{peer, waited_for, channel, operation, sequence, seen});
}

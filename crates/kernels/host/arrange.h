// Makes a launch of a group's calls, in C++, for the tests on the host and the program on GPUs. The product does the same in Rust
// (src/arrange.rs); tests/kernels/arrange.rs checks that both make the same bytes.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "../device/p2p.h"

struct P2pCall {
  uint64_t address;
  uint64_t bytes;
  uint32_t peer;  // index in the table of peers
  uint32_t receive;
};

// Addresses of both directions with one peer; the fields after `peer` are zero.
struct P2pPeer {
  WindlassP2pConnection send, receive;
};

struct P2pLimits {
  uint32_t bulk_copies;  // whether the architecture has them
  uint32_t stages;       // chunks in shared memory; even, 2 to 8
  uint32_t shared_bytes_max;
};

struct P2pShape {
  uint32_t blocks;  // 0: nothing to launch; p2p_refused: a block has no room for the state of its channels
  uint32_t threads;
  uint32_t shared_bytes;
  uint32_t cluster;          // blocks of a cluster; 1: no attribute
  uint32_t parameter_bytes;  // used part of the launch
  uint32_t lists_operations; // the operations did not fit: place them and set operation_list
};

constexpr uint32_t p2p_refused = ~0u;
constexpr uint32_t p2p_copy_warps_max = 16;   // of a block
constexpr uint32_t p2p_bulk_copy_warps = p2p_copy_warps_max - WINDLASS_BULK_SERVICE_WARPS;
constexpr uint64_t p2p_bytes_a_copying_thread = 128;
constexpr uint32_t p2p_copying_threads = 16 * 512;  // beside messages
constexpr uint32_t p2p_copy_blocks_max = 64;

inline uint32_t windlass_divided_up(uint32_t dividend, uint32_t divisor) { return (dividend + divisor - 1) / divisor; }

// What one virtual block serves, by direction: sends, receives.
struct P2pLoad {
  uint32_t ll128[2], bulk[2];
  bool serves() const { return ll128[0] || ll128[1] || bulk[0] || bulk[1]; }
};

// The virtual block of channel 0 from `sender` to `receiver`.
inline uint32_t p2p_first_block(uint32_t sender, uint32_t receiver, uint32_t ranks, uint32_t blocks) {
  const uint32_t between = (receiver % ranks + ranks - sender % ranks - 1) % ranks;
  return between * std::max(1u, blocks / std::max(1u, ranks - 1)) % blocks;
}

// The number of virtual blocks over which a message by LL128 goes: at most 2, whole clusters, or all.
inline uint32_t p2p_blocks_of(uint64_t bytes, uint32_t blocks) {
  constexpr uint64_t bytes_a_block = WINDLASS_PACKETS_A_BLOCK * WINDLASS_PACKET_PAYLOAD_BYTES;
  const uint32_t least = (uint32_t)std::min<uint64_t>((bytes + bytes_a_block - 1) / bytes_a_block, blocks);
  return least > 2 ? std::min((least + 3) / 4 * 4, blocks) : least;
}

inline uint32_t p2p_channels(uint64_t bytes, uint64_t piece_bytes, uint32_t channels) {
  return (uint32_t)std::min<uint64_t>(channels, (bytes + piece_bytes - 1) / piece_bytes);
}

// Fills the launch (all but control, report, operation_list and flags) and `operations`, which the launch holds too,
// unless shape.lists_operations.
inline P2pShape p2p_arrange(const P2pCall* calls, size_t count, const P2pPeer* peers, size_t peer_count,
                              const WindlassP2pGeometry& geometry, const P2pLimits& limits, WindlassP2pLaunch& launch,
                              std::vector<WindlassP2pOperation>& operations) {
  std::memset(&launch, 0, sizeof launch);
  launch.geometry = geometry;
  launch.ll128_rounds = (uint16_t)(geometry.ll128_channels / geometry.bulk_channels);
  constexpr uint64_t packet = WINDLASS_PACKET_PAYLOAD_BYTES;
  operations.clear();
  auto* const connections = reinterpret_cast<WindlassP2pConnection*>(launch.storage);
  uint32_t used = 0;
  bool tma_producer = false, ordinary = false;
  P2pLoad loads[WINDLASS_VIRTUAL_BLOCKS_MAX] = {};
  for (uint32_t receive = 0; receive < 2; ++receive)
    for (size_t peer = 0; peer < peer_count; ++peer) {
      if (peer == geometry.rank) continue;
      WindlassP2pConnection connection = receive ? peers[peer].receive : peers[peer].send;
      connection.flags = receive ? WINDLASS_CONNECTION_RECEIVE : 0;
      connection.first_operation = (uint32_t)operations.size();
      bool aligned = true;
      for (size_t i = 0; i < count; ++i) {
        const P2pCall& call = calls[i];
        if (call.peer != peer || call.receive != receive || call.bytes == 0) continue;
        operations.push_back({call.address, std::min<uint64_t>(call.bytes, (1ull << WINDLASS_BLOCKS_SHIFT) - 1)});
        if (call.bytes >= geometry.bulk_from_bytes) {
          connection.active_bulk_channels = std::max(connection.active_bulk_channels, p2p_channels(call.bytes, geometry.bulk_chunk_bytes, geometry.bulk_channels));
          aligned &= call.address % 16 == 0;
        } else {
          const uint32_t over = p2p_blocks_of(call.bytes, geometry.bulk_channels);
          operations.back().bytes |= (uint64_t)over << WINDLASS_BLOCKS_SHIFT;
          const uint64_t rounds = (call.bytes + over * packet - 1) / (over * packet);
          connection.active_ll128_blocks = std::max<uint16_t>(connection.active_ll128_blocks, (uint16_t)over);
          connection.active_ll128_rounds = std::max<uint16_t>(connection.active_ll128_rounds, (uint16_t)std::min<uint64_t>(rounds, launch.ll128_rounds));
        }
      }
      connection.operations = (uint32_t)operations.size() - connection.first_operation;
      if (connection.operations == 0) continue;
      if (!receive && connection.active_bulk_channels) {
        if (limits.bulk_copies && aligned) {
          tma_producer = true;
        } else {
          connection.flags |= WINDLASS_CONNECTION_ORDINARY_STORES;
          ordinary = true;
        }
      }
      const uint32_t blocks = geometry.bulk_channels, ranks = (uint32_t)peer_count, other = (uint32_t)peer;
      connection.first_block = (uint16_t)(receive ? p2p_first_block(other, geometry.rank, ranks, blocks)
                                               : p2p_first_block(geometry.rank, other, ranks, blocks));
      for (uint32_t block = 0; block < connection.active_ll128_blocks; ++block)
        loads[(connection.first_block + block) % blocks].ll128[receive] += connection.active_ll128_rounds;
      for (uint32_t channel = 0; channel < connection.active_bulk_channels; ++channel) ++loads[(connection.first_block + channel) % blocks].bulk[receive];
      connections[used++] = connection;
      ++(receive ? launch.receive_connections : launch.send_connections);
    }
  launch.operations = (uint32_t)operations.size();
  // Messages of the rank to itself: the first send goes to the first receive, and so on.
  uint64_t copied = 0;
  for (size_t from = 0, to = 0; from < count && to < count; ++from, ++to) {
    while (from < count && (calls[from].peer != geometry.rank || calls[from].receive)) ++from;
    while (to < count && (calls[to].peer != geometry.rank || !calls[to].receive)) ++to;
    if (from == count || to == count) break;
    const uint64_t bytes = std::min(calls[from].bytes, calls[to].bytes);
    if (bytes == 0 || calls[from].address == calls[to].address) continue;
    operations.push_back({calls[to].address, bytes});
    operations.push_back({calls[from].address, bytes});
    ++launch.copies;
    copied += bytes;
  }
  P2pShape shape = {};
  if (operations.empty()) return shape;

  uint32_t blocks = 0, ll128[2] = {};
  for (uint32_t block = 0; block < geometry.bulk_channels; ++block) {
    const P2pLoad& load = loads[block];
    if (!load.serves()) continue;
    ++blocks;
    launch.used_blocks |= 1u << block;
    launch.bulk_tasks = std::max(launch.bulk_tasks, load.bulk[0] + load.bulk[1]);
    for (int way = 0; way < 2; ++way) ll128[way] = std::max(ll128[way], load.ll128[way]);
  }
  const bool bulk = launch.bulk_tasks;
  shape.cluster = 1;
  if (blocks > 2 && windlass_divided_up(blocks, 4) * 4 <= geometry.bulk_channels) {
    // Whole clusters: otherwise the first blocks crowd on one part of the GPU and starve its links.
    blocks = windlass_divided_up(blocks, 4) * 4;
    shape.cluster = 4;
  }
  const uint32_t copy_warps_max = bulk ? p2p_bulk_copy_warps : p2p_copy_warps_max;
  const uint32_t warps_max = ll128[0] && ll128[1] ? copy_warps_max / 2 : copy_warps_max;
  launch.ll128_send_warps = std::min(warps_max, ll128[0]);
  launch.ll128_receive_warps = std::min(warps_max, ll128[1]);
  launch.copy_warps = std::max(launch.ll128_send_warps + launch.ll128_receive_warps, bulk ? copy_warps_max : 0);

  // The most jobs of a copy warp: its LL128 channels of one direction, and its part in the block's bulk channels.
  const auto share = [](uint32_t channels, uint32_t warps) { return warps ? windlass_divided_up(channels, warps) : 0; };
  const auto jobs = [&] {
    uint32_t most = 0;
    for (const P2pLoad& load : loads)
      most = std::max(most, std::max(share(load.ll128[0], launch.ll128_send_warps), share(load.ll128[1], launch.ll128_receive_warps)) +
                                load.bulk[1] + (ordinary ? load.bulk[0] : 0));
    return most > 1 || bulk ? most : 0;
  };
  launch.jobs_per_warp = (uint16_t)jobs();
  launch.stages = (uint16_t)(tma_producer ? limits.stages : 0);
  shape.shared_bytes = blocks ? windlass_shared_layout(launch).total : 0;
  if (launch.stages && shape.shared_bytes > limits.shared_bytes_max) {
    launch.stages = 0;
    ordinary = true;
    for (uint32_t i = 0; i < launch.send_connections; ++i)
      if (connections[i].active_bulk_channels) connections[i].flags |= WINDLASS_CONNECTION_ORDINARY_STORES;
    launch.jobs_per_warp = (uint16_t)jobs();
    shape.shared_bytes = windlass_shared_layout(launch).total;
  }
  if (shape.shared_bytes > limits.shared_bytes_max) {
    shape = {};
    shape.blocks = p2p_refused;
    return shape;
  }
  shape.threads = 32 * (blocks ? launch.copy_warps + (bulk ? WINDLASS_BULK_SERVICE_WARPS : 0) : p2p_copy_warps_max);
  const uint64_t a_block = p2p_bytes_a_copying_thread * shape.threads, copy_blocks = (copied + a_block - 1) / a_block;
  const uint32_t most = std::min(blocks ? p2p_copying_threads / shape.threads : p2p_copy_blocks_max, p2p_copy_blocks_max);
  launch.copy_blocks = (uint16_t)(windlass_divided_up((uint32_t)std::min<uint64_t>(copy_blocks, most), shape.cluster) * shape.cluster);
  shape.blocks = blocks + launch.copy_blocks;
  uint32_t bytes = used * (uint32_t)sizeof(WindlassP2pConnection);
  const uint32_t listed = (uint32_t)(operations.size() * sizeof(WindlassP2pOperation));
  if (bytes + listed <= WINDLASS_INLINE_BYTES) {
    std::memcpy(reinterpret_cast<char*>(launch.storage) + bytes, operations.data(), listed);
    bytes += listed;
  } else {
    shape.lists_operations = 1;
  }
  shape.parameter_bytes = WINDLASS_LAUNCH_HEAD_BYTES + bytes;
  return shape;
}

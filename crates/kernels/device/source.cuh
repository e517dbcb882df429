// Says where packets lie in the user's buffers: OneCall for a kernel's only collective, CallsOfBatch for several, whose packets follow
// each other. Addresses and sizes are those of the call that holds the packet last passed to `find`.
#pragma once
#include "collective.h"
#include "machine.cuh"

struct OneCall {
  typedef WindlassCollectiveLaunch Parameter;
  static constexpr bool several = false;
  const WindlassCollectiveLaunch& of;

  WINDLASS_DEVICE explicit OneCall(const WindlassCollectiveLaunch& launch) : of(launch) {}
  WINDLASS_DEVICE const WindlassCollectiveLaunch& launch() const { return of; }
  WINDLASS_DEVICE void find(uint32_t) {}
  WINDLASS_DEVICE uint32_t first_packet() const { return 0; }
  WINDLASS_DEVICE uint64_t send(uint32_t rank) const { return of.send[rank]; }
  WINDLASS_DEVICE uint64_t send_bytes(uint32_t rank) const { return of.send_bytes[rank]; }
  WINDLASS_DEVICE uint64_t receive(uint32_t rank) const { return of.receive[rank]; }
  WINDLASS_DEVICE uint64_t receive_bytes(uint32_t rank) const { return of.receive_bytes[rank]; }
};

// `shares`: for all-reduces in two phases. Each rank has a share; those of the last ranks are shorter, or empty.
template <bool shares>
struct CallsOfBatch {
  typedef WindlassBatchLaunch Parameter;
  static constexpr bool several = true;
  const WindlassBatchLaunch& of;
  uint32_t call = 0;

  WINDLASS_DEVICE explicit CallsOfBatch(const WindlassBatchLaunch& batch) : of(batch) {}
  WINDLASS_DEVICE const WindlassCollectiveLaunch& launch() const { return of.launch; }
  WINDLASS_DEVICE const WindlassBatchCall& own() const { return of.calls[call]; }
  // Packets that share an entry have that of the first one's call. A call without packets has the next call's first_packet, so it is passed over.
  WINDLASS_DEVICE void find(uint32_t packet) {
    call = of.call_of_packet[packet >> of.packets_log2];
    WINDLASS_NO_UNROLL
    while (call + 1 < of.count && of.calls[call + 1].first_packet <= packet) ++call;
  }
  WINDLASS_DEVICE uint32_t first_packet() const { return own().first_packet; }
  WINDLASS_DEVICE uint64_t send(uint32_t rank) const { return own().send + (uint64_t)rank * own().send_step; }
  WINDLASS_DEVICE uint64_t send_bytes(uint32_t rank) const { return bytes(rank, own().send_step); }
  WINDLASS_DEVICE uint64_t receive(uint32_t rank) const { return own().receive + (uint64_t)rank * own().receive_step; }
  WINDLASS_DEVICE uint64_t receive_bytes(uint32_t rank) const { return bytes(rank, own().receive_step); }
  WINDLASS_DEVICE uint64_t bytes(uint32_t rank, uint32_t share) const {
    const uint64_t all = own().bytes, from = (uint64_t)rank * share;
    return !shares ? all : from >= all ? 0 : all - from < share ? all - from : share;
  }
};

// All-reduce in two phases, packet by packet: some warps send every rank its share, some reduce this rank's share and send the result,
// some take the others' results. In place too: a share is overwritten by its result only after that was made of it.
//
// A reduce in two phases is the same with one rank that gets results, the root. It has no share, so that its links carry the buffer once.
#pragma once
#include "parts.cuh"

// The rank that gets results, plus 1; 0: all do.
WINDLASS_DEVICE uint32_t root_of(const WindlassCollectiveLaunch& launch) { return launch.flags >> WINDLASS_COLLECTIVE_ROOT_SHIFT; }

// Reduces this rank's share and sends the result to the ranks that get it. False: aborted.
template <class Reducer, int ranks_max, class From, class To>
WINDLASS_DEVICE bool reduce_and_send(From& shares, To& results) {
  const WindlassCollectiveLaunch& launch = shares.launch;
  const uint32_t me = shares.me();
  for (; shares.has_step() && results.has_step(); ++shares.step, ++results.step) {
    constexpr int sources = sources_of<Reducer, ranks_max>;
    Vector x[sources][From::groups], result[1][From::groups];
    load_packet(shares, result[0], shares.source.send(me), shares.source.send_bytes(me));
    scale_own<Reducer>(result[0], launch);
    if constexpr (sources > 1) spread(x, result[0]);
    if (!take_packet(shares, x, WINDLASS_WAITED_LL128_DATA)) return false;
    reduce_packet<Reducer>(result[0], x, launch);
    if (!put_packet<ranks_max>(results, result, WINDLASS_WAITED_RESULT_CREDIT)) return false;
    store_packet(results, result[0], results.source.receive(me), results.source.receive_bytes(me));
    // Credit only now: the packets taken have been used, so their loads have returned. Simple packets have no tags that would show it.
    shares.has_consumed();
  }
  return true;
}

template <int ranks_max, class From>
WINDLASS_DEVICE bool take_results(From& results) {
  for (; results.has_step(); ++results.step) {
    constexpr int sources = sources_of<Copy, ranks_max>;
    Vector x[sources][From::groups];
    if (!take_packet(results, x, WINDLASS_WAITED_RESULT_DATA)) return false;
    WINDLASS_UNROLL
    for (int i = 0; i < sources; ++i) {
      const uint32_t rank = source_of<sources>(results, i);
      if (results.moves_peer(rank)) store_packet(results, x[i], results.source.receive(rank), results.source.receive_bytes(rank));
    }
    results.has_consumed();
  }
  return true;
}

// See run_ll128. All-reduces are even: if shares differ, some packets are empty. Reduces are not even: a connection has the packets of its bytes.
template <class Reducer, int ranks_max, int groups, bool straight, class Source>
WINDLASS_DEVICE void run_all_reduce(const typename Source::Parameter& parameter) {
  const Source source(parameter);
  const WindlassCollectiveLaunch& launch = source.launch();
  begin_after_previous(launch.flags & WINDLASS_COLLECTIVE_EARLY_NEXT);
  const uint32_t warp = warp_index(), role_warps = launch.role_warps, place = lane_index() % 8;
  if (warp < role_warps) {
    for (Channels channels(launch, warp); channels.next < channels.last; channels.next += channels.stride) {
      Ll128Sender<groups, straight, Source> shares(source, launch.wires[0], channels.next, launch.send_bytes[place]);
      if (!send_parts<Reducer, ranks_max>(shares)) return;
      shares.end();
    }
  } else if (warp < 2 * role_warps) {
    for (Channels channels(launch, warp - role_warps); channels.next < channels.last; channels.next += channels.stride) {
      const uint64_t share = launch.send_bytes[launch.rank];
      Ll128Receiver<groups, straight, Source> shares(source, launch.wires[0], channels.next, share);
      Ll128Sender<groups, straight, Source> results(source, launch.wires[1], channels.next, place + 1 == root_of(launch) ? share : 0);
      if (!reduce_and_send<Reducer, ranks_max>(shares, results)) return;
      shares.end();
      results.end();
    }
  } else {
    for (Channels channels(launch, warp - 2 * role_warps); channels.next < channels.last; channels.next += channels.stride) {
      Ll128Receiver<groups, straight, Source> results(source, launch.wires[1], channels.next, launch.receive_bytes[place]);
      if (!take_results<ranks_max>(results)) return;
      results.end();
    }
  }
}

template <class Reducer, int ranks_max, bool straight>
WINDLASS_DEVICE void run_simple_all_reduce(const WindlassCollectiveLaunch& launch) {
  uint32_t* const counters = begin_posting(launch, 2);
  const uint32_t warp = warp_index(), role_warps = launch.role_warps;
  if (warp < role_warps) {
    Told told{counters + warp, 0};
    for (Channels channels(launch, warp); channels.next < channels.last; channels.next += channels.stride) {
      SimpleSender<straight> shares(OneCall(launch), launch.wires[0], channels.next, 0, told);
      if (!send_parts<Reducer, ranks_max>(shares)) return;
    }
  } else if (warp < 2 * role_warps) {
    Told told{counters + warp, 0};
    for (Channels channels(launch, warp - role_warps); channels.next < channels.last; channels.next += channels.stride) {
      SimpleReceiver<straight> shares(OneCall(launch), launch.wires[0], channels.next, 0);
      SimpleSender<straight> results(OneCall(launch), launch.wires[1], channels.next, 0, told);
      if (!reduce_and_send<Reducer, ranks_max>(shares, results)) return;
      shares.end();
    }
  } else if (warp < 3 * role_warps) {
    for (Channels channels(launch, warp - 2 * role_warps); channels.next < channels.last; channels.next += channels.stride) {
      SimpleReceiver<straight> results(OneCall(launch), launch.wires[1], channels.next, 0);
      if (!take_results<ranks_max>(results)) return;
      results.end();
    }
  } else {
    post<2, straight>(launch, counters);
  }
}

// Kernels of collectives in one phase, over LL128 and Simple: all but all-reduces and large reduces. Receivers store or reduce what comes.
#pragma once
#include "parts.cuh"

// A warp has one role. Each role has its own loop over the channels, so that the compiler keeps nothing of the other role in registers.
template <class Reducer, int ranks_max, int groups, bool straight, class Source>
WINDLASS_DEVICE void run_ll128(const typename Source::Parameter& parameter) {
  const Source source(parameter);
  const WindlassCollectiveLaunch& launch = source.launch();
  begin_after_previous(launch.flags & WINDLASS_COLLECTIVE_EARLY_NEXT);
  const uint32_t me = launch.rank, place = lane_index() % 8;
  if (warp_index() >= launch.role_warps) {
    const uint64_t bytes = Source::several ? 0 : launch.receive_bytes[Reducer::reduces ? me : place];
    for (Channels channels(launch, warp_index() - launch.role_warps); channels.next < channels.last; channels.next += channels.stride) {
      Ll128Receiver<groups, straight, Source> way(source, launch.wires[0], channels.next, bytes);
      if (!receive_parts<Reducer, ranks_max>(way)) return;
      way.end();
    }
    return;
  }
  const bool same = !Reducer::reduces && (Source::several || launch.flags & WINDLASS_COLLECTIVE_SAME);
  for (Channels channels(launch, warp_index()); channels.next < channels.last; channels.next += channels.stride) {
    Ll128Sender<groups, straight, Source> way(source, launch.wires[0], channels.next, Source::several ? 0 : launch.send_bytes[place]);
    if (!(same ? send_same<ranks_max>(way) : send_parts<Reducer, ranks_max>(way))) return;
    way.end();
  }
}

// Only for even launches that reduce: the signal warp assumes that all peers use every channel alike.
template <class Reducer, int ranks_max, bool straight>
WINDLASS_DEVICE void run_simple(const WindlassCollectiveLaunch& launch) {
  uint32_t* const counters = begin_posting(launch, 1);
  const uint32_t warp = warp_index(), role_warps = launch.role_warps;
  if (warp < role_warps) {
    Told told{counters + warp, 0};
    for (Channels channels(launch, warp); channels.next < channels.last; channels.next += channels.stride) {
      SimpleSender<straight> way(OneCall(launch), launch.wires[0], channels.next, 0, told);
      if (!send_parts<Reducer, ranks_max>(way)) return;
      way.end();
    }
  } else if (warp < 2 * role_warps) {
    for (Channels channels(launch, warp - role_warps); channels.next < channels.last; channels.next += channels.stride) {
      SimpleReceiver<straight> way(OneCall(launch), launch.wires[0], channels.next, 0);
      if (!receive_parts<Reducer, ranks_max>(way)) return;
      way.end();
    }
  } else {
    post<1, straight>(launch, counters);
  }
}

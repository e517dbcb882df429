// The group kernel: all sends and receives of one group of one communicator on one stream.
//
// No block waits for another block of its grid, and no job for another job of its rank, except that a block's parts of one
// bulk chunk are credited together. Which block serves a channel is the same on both of its sides (blocks_behind); which warp of it
// does, is this launch's own affair: channels keep their state in device memory between launches.
#pragma once
#include "bulk_channel.cuh"
#include "copies.cuh"
#include "ll128_channel.cuh"

// Finds the jobs of one copy warp, one after the other. The LL128 channels that a block serves are dealt to its warps.
struct JobList {
  const Group& group;
  const BulkBlock& block;
  const uint32_t copy_warp;
  // position in the list
  JobKind kind = job_ll128_send;
  uint32_t next = 0;

  WINDLASS_DEVICE bool find_ll128(bool receive, Job& job) {
    const WindlassP2pLaunch& launch = group.launch;
    const uint32_t warps = receive ? launch.ll128_receive_warps : launch.ll128_send_warps;
    const uint32_t first_warp = receive ? launch.copy_warps - warps : 0;
    if (copy_warp < first_warp || copy_warp >= first_warp + warps) return false;
    const uint32_t end = receive ? group.connections() : launch.send_connections;
    uint32_t left = copy_warp - first_warp + warps * next, behind;
    uint32_t index = receive ? launch.send_connections : 0;
    WindlassP2pConnection connection;
    for (;; ++index) {
      if (index == end) return false;
      connection = group.connection(index);
      behind = blocks_behind(group, connection);
      if (behind >= connection.active_ll128_blocks) continue;
      if (left < connection.active_ll128_rounds) break;
      left -= connection.active_ll128_rounds;
    }
    job.connection = (uint16_t)index;
    job.round = (uint16_t)left;
    job.channel = (uint16_t)(behind + left * group.geometry().bulk_channels);
    job.operation = job.step = 0;
    job.kind = receive ? job_ll128_receive : job_ll128_send;
    begin_ll128_job(group, connection, job);
    ++next;
    return true;
  }

  WINDLASS_DEVICE bool find_bulk(bool receive, Job& job) {
    while (next < (receive ? block.receive_tasks : block.send_tasks)) {
      const uint32_t index = (receive ? block.send_tasks : 0) + next++;
      const BulkTask& task = block.tasks[index];
      const WindlassP2pConnection connection = group.connection(task.connection);
      if (!receive && !(connection.flags & WINDLASS_CONNECTION_ORDINARY_STORES)) continue;  // the TMA producer's
      job.connection = task.connection;
      job.channel = task.channel;
      job.operation = job.step = 0;
      job.task = (uint16_t)index;
      job.kind = receive ? job_bulk_receive : job_bulk_send;
      begin_bulk_job(group, block, connection, job);
      return true;
    }
    return false;
  }

  WINDLASS_DEVICE bool find(Job& job) {
    for (;;) {
      const bool found = kind == job_ll128_send      ? find_ll128(false, job)
                         : kind == job_ll128_receive ? find_ll128(true, job)
                         : kind == job_bulk_send    ? find_bulk(false, job)
                                                    : find_bulk(true, job);
      if (found) return true;
      if (kind == job_bulk_receive) return false;
      kind = (JobKind)(kind + 1);
      next = 0;
    }
  }
};

WINDLASS_DEVICE bool step_job(const Group& group, const BulkBlock& block, const WindlassP2pConnection& connection, uint32_t copy_warp,
                          Job& job, bool look) {
  switch (job.kind) {
    case job_ll128_send: return step_ll128_send(group, connection, job, look);
    case job_ll128_receive: return step_ll128_receive(group, connection, job, look);
    case job_bulk_send: return step_bulk_send(group, block, connection, copy_warp, job, look);
    default: return step_bulk_receive(group, block, connection, copy_warp, job);
  }
}

WINDLASS_DEVICE void report_job(const Group& group, const Job& job) {
  if (lane_index() != 0) return;
  const WindlassP2pConnection connection = group.connection(job.connection);
  const uint32_t waited_for = job.kind == job_ll128_send      ? WINDLASS_WAITED_P2P_LL128_CREDIT
                              : job.kind == job_ll128_receive ? WINDLASS_WAITED_P2P_LL128_DATA
                              : job.kind == job_bulk_send    ? WINDLASS_WAITED_BULK_CREDIT
                                                             : WINDLASS_WAITED_BULK_DATA;
  report_wait(group, connection.peer, waited_for, job.channel, job.operation, job.count, job.seen);
}

// Asks for a larger ring, if the job is a sender that has not moved. Called after a long wait.
WINDLASS_DEVICE void request_growth_for(const Group& group, const Job& job) {
  const bool ll128 = job.kind == job_ll128_send;
  if (lane_index() != 0 || job.grown || !(ll128 || job.kind == job_bulk_send)) return;
  request_growth(group, group.connection(job.connection).peer, ll128 ? WINDLASS_GROWTH_LL128 : WINDLASS_GROWTH_BULK);
}

// The wait of a copy warp with one job, of LL128: the job stays in registers, and nothing else runs between two polls.
struct RoomWait {
  uint32_t idle = 0;

  // Called after an unsuccessful poll. True: the warp must leave, and has reported what it waited for.
  WINDLASS_DEVICE bool ends(const Group& group, const Job& job) {
    pause_thread();
    if (++idle % rounds_between_looks) return false;
    if (idle % rounds_before_request == 0) request_growth_for(group, job);
    if (!any_of_warp(group.aborted())) return false;
    report_job(group, job);
    return true;
  }
  WINDLASS_DEVICE bool looks_for_growth() const {
    return idle % rounds_between_looks == rounds_between_looks - 1;
  }
};

// The payload's loads are in flight while the warp looks for room (for the first packet: for the channel's state).
WINDLASS_DEVICE void run_ll128_send(const Group& group, const WindlassP2pConnection& connection, Job& job) {
  while (job.live) {
    Packet packet;
    Piece piece;
    load_next(group, connection, job, packet, piece);
    RoomWait wait;
    while (!has_ll128_room(group, connection, job, wait.looks_for_growth()))
      if (wait.ends(group, job)) return;
    send_loaded(group, connection, job, packet, piece);
  }
}

WINDLASS_DEVICE void run_ll128_receive(const Group& group, const WindlassP2pConnection& connection, Job& job) {
  RoomWait wait;
  Piece piece;
  find_piece(group, connection, false, job.channel, job.round, job.operation, job.step, piece);
  while (job.live) {
    if (receive_found(group, connection, job, piece)) continue;
    if (wait.looks_for_growth()) follow_ll128_job(group, connection, job);
    if (wait.ends(group, job)) return;
  }
}

// A copy warp with several jobs takes them in turn and never stays with one that cannot move.
WINDLASS_DEVICE void run_several(const Group& group, const BulkBlock& block, uint32_t copy_warp, Job* jobs, uint32_t count) {
  uint32_t idle = 0, live = count, turn = 0;
  while (live) {
    bool moved = false;
    // By turns, not by idle ones: a channel that could move into a larger ring may share the warp with channels that are never stalled.
    const bool look = ++turn % rounds_between_looks == 0;
    for (uint32_t index = 0; index < count; ++index) {
      Job job = jobs[index];
      if (!job.live) continue;
      const WindlassP2pConnection connection = group.connection(job.connection);
      if (step_job(group, block, connection, copy_warp, job, look)) moved = true;
      if (!job.live) --live;
      // All lanes have read the job before lane 0 writes it, and it is written before any lane reads it again.
      sync_warp();
      if (lane_index() == 0) jobs[index] = job;
      sync_warp();
    }
    if (moved) {
      idle = 0;
    } else {
      pause_thread();
      if (++idle % rounds_between_looks) continue;
      if (idle % rounds_before_request == 0)
        for (uint32_t index = 0; index < count; ++index)
          if (jobs[index].live) request_growth_for(group, jobs[index]);
      if (any_of_warp(group.aborted())) {
        for (uint32_t index = 0; index < count; ++index)
          if (jobs[index].live) report_job(group, jobs[index]);
        return;
      }
    }
  }
}

WINDLASS_DEVICE void run_copy_warp(const Group& group, const BulkBlock& block, uint32_t copy_warp, Job* jobs) {
  JobList list{group, block, copy_warp};
  Job job;
  if (!list.find(job)) return;
  if (group.launch.jobs_per_warp == 0) {
    const WindlassP2pConnection connection = group.connection(job.connection);
    if (job.kind == job_ll128_send)
      run_ll128_send(group, connection, job);
    else
      run_ll128_receive(group, connection, job);
    return;
  }
  uint32_t count = 0;
  do {
    if (!job.live) continue;
    if (lane_index() == 0) jobs[count] = job;
    ++count;
  } while (list.find(job));
  sync_warp();
  run_several(group, block, copy_warp, jobs, count);
}

WINDLASS_DEVICE void run_group(const WindlassP2pLaunch& launch) {
  begin_after_previous(launch.flags & WINDLASS_LAUNCH_EARLY_NEXT);
  const Group group{launch, virtual_block(launch.used_blocks, block_index())};
  const uint32_t first_copy_block = block_count() - launch.copy_blocks;
  if (block_index() >= first_copy_block) {
    run_copies(group, block_index() - first_copy_block);
    return;
  }
  if (group.block == no_block) return;
  char* const shared = shared_memory();
  const WindlassP2pShared layout = windlass_shared_layout(launch);
  const bool bulk = launch.bulk_tasks != 0;
  BulkBlock block{reinterpret_cast<BulkTask*>(shared + layout.tasks), reinterpret_cast<uint32_t*>(shared + layout.told),
                  launch.copy_warps, 0, 0};
  if (bulk) {
    block.send_tasks = bulk_channels_here(group, 0, launch.send_connections);
    block.receive_tasks = bulk_channels_here(group, launch.send_connections, launch.receive_connections);
  }
  Job* const jobs = reinterpret_cast<Job*>(shared + layout.jobs);

  if (bulk) {
    for (uint32_t index = thread_index(); index < block.count(); index += thread_count()) begin_bulk_task(group, block, index);
#if WINDLASS_HAS_BULK_COPIES
    Barrier* const barriers = reinterpret_cast<Barrier*>(shared + layout.barriers);
    if (thread_index() == 0) {
      for (uint32_t stage = 0; stage < launch.stages; ++stage) barrier_make(barriers + stage);
      barriers_made();
    }
#endif
    // The block's only barrier: all threads see the tasks, and all bases are read before the signal warp writes the progress words.
    sync_block();
    if (warp_index() == 0) {
#if WINDLASS_HAS_BULK_COPIES
      if (lane_index() == 0 && launch.stages) {
        TmaProducer tma_producer{group, block, shared + layout.stages, barriers, reinterpret_cast<Order*>(shared + layout.orders)};
        tma_producer.run();
      }
#endif
      return;
    }
    if (warp_index() == 1) {
      run_signal_warp(group, block);
      return;
    }
  }
  // Called from one place only, as it is most of the code.
  const uint32_t copy_warp = warp_index() - (bulk ? WINDLASS_BULK_SERVICE_WARPS : 0);
  run_copy_warp(group, block, copy_warp, jobs + copy_warp * launch.jobs_per_warp);
}

// Bulk channels: rings of chunks for large messages. A chunk is there when the posted word exceeds its number.
//
// Roles in a block. The TMA producer (one thread) moves whole chunks by asynchronous copies, user -> shared memory -> slot. The
// copy warps (all other warps) copy chunks out, each its part of each chunk, and, where the TMA producer cannot serve, copy them in.
// The signal warp is the only writer of the words that the peer reads: posted words of channels that send, credit words
// of channels that receive. The other roles only tell the signal warp, through counters in shared memory, how far they are. This way
//  - a system fence, which waits for all of an SM's stores, holds up neither TMA producer nor copy warps, and one serves all channels;
//  - a word has one writer, so it cannot step back.
//
// Invariant of a channel: credit <= copied out <= posted <= copied in <= credit + slots.
#pragma once
#include "job.cuh"

// A bulk channel that this block serves, sends first. Lies in shared memory.
struct alignas(16) BulkTask {
  uint64_t base;       // chunks of the channel before this launch
  uint64_t seen;       // TMA producer: the last credit read
  uint64_t grown;      // the ring into which the channel moves or has moved; to be read only once `gate` is closed
  uint32_t total;      // chunks of this launch
  uint32_t published;  // of these, how many the signal warp has posted or credited
  uint32_t pushed;     // TMA producer: of these, how many it has begun to load
  uint32_t stored;     // TMA producer: of these, how many it has told complete
  uint32_t operation;  // TMA producer: the message of its next chunk
  uint32_t step;       // TMA producer: chunks of that message that it has begun to load
  uint32_t gate;        // see gate_closed
  uint16_t connection;
  uint16_t channel;
  uint32_t tellers;    // number of counters to read: one of each copy warp, or the TMA producer's one
  uint32_t announced;  // signal warp: the receiver has been told the first chunk in the grown ring
};
static_assert(sizeof(BulkTask) == 64, "WindlassP2pShared.tasks counts 64 bytes a task");

// The gate between a channel's two rings: all senders of its chunks must agree on the first chunk in the grown ring.
//  - Open: the number of this launch's chunks that may have gone, or may yet go, into the first ring. Copy warps raise the gate
//    before they use room that they have just seen.
//  - Closed by one sender, by the bit gate_closed: chunks from that number on go into the grown ring.
// On a channel that receives: closed once a copy warp has learnt of a move, or if the channel moved before this launch.
constexpr uint32_t gate_closed = 1u << 31;

// A chunk in shared memory, between the TMA producer's load and its store.
struct alignas(16) Order {
  uint64_t slot;
  uint32_t bytes;
  uint32_t task;
};
static_assert(sizeof(Order) == 16, "WindlassP2pShared.orders counts 16 bytes an order");

// The block's shared memory.
struct BulkBlock {
  BulkTask* tasks;
  uint32_t* told;  // [task][copy warp]: chunks of this launch that a copy warp (or, at copy warp 0, the TMA producer) is done with
  uint32_t copy_warps;
  uint32_t send_tasks;
  uint32_t receive_tasks;

  WINDLASS_DEVICE uint32_t count() const { return send_tasks + receive_tasks; }
  WINDLASS_DEVICE uint32_t* teller(uint32_t task, uint32_t copy_warp) const { return told + task * copy_warps + copy_warp; }
};

WINDLASS_DEVICE char* bulk_slot(const Group& group, const WindlassP2pConnection& connection, uint32_t channel, uint64_t count,
                            uint64_t from, uint64_t grown) {
  return slot_of(connection.bulk_ring, group.geometry().bulk_slots, from, grown, channel, count, group.geometry().bulk_chunk_bytes);
}
WINDLASS_DEVICE uint64_t bulk_word(uint64_t words, uint32_t channel) { return words + channel * WINDLASS_BULK_WORD_STRIDE; }
// The word beside the posted word: 1 + the first chunk in the grown ring, or 0.
WINDLASS_DEVICE uint64_t bulk_from(const WindlassP2pConnection& connection, uint32_t channel) {
  return bulk_word(connection.bulk_posted, channel) + 8;
}
WINDLASS_DEVICE uint64_t bulk_growth(const WindlassP2pConnection& connection) { return connection.growth + 8 * WINDLASS_GROWTH_BULK; }

// The number of bulk channels of these connections that this block serves: of each at most one.
WINDLASS_DEVICE uint32_t bulk_channels_here(const Group& group, uint32_t first_connection, uint32_t connections) {
  uint32_t channels = 0;
  for (uint32_t i = first_connection; i < first_connection + connections; ++i) {
    const WindlassP2pConnection connection = group.connection(i);
    if (blocks_behind(group, connection) < connection.active_bulk_channels) ++channels;
  }
  return channels;
}

// Fills task `index` of the block: tasks are its bulk channels, connection after connection.
WINDLASS_DEVICE void begin_bulk_task(const Group& group, const BulkBlock& block, uint32_t index) {
  const bool receive = index >= block.send_tasks;
  uint32_t left = index, connection_index = 0;
  WindlassP2pConnection connection = group.connection(0);
  uint32_t channel = blocks_behind(group, connection);
  while (channel >= connection.active_bulk_channels || left-- > 0) {
    connection = group.connection(++connection_index);
    channel = blocks_behind(group, connection);
  }
  BulkTask& task = block.tasks[index];
  const Vector own = load_own_words(connection.bulk_progress + channel * WINDLASS_PROGRESS_STRIDE);
  task.base = own.x;
  const bool may_move = !receive && own.y == 0 && group.launch.flags & WINDLASS_LAUNCH_BULK_GREW;
  task.grown = may_move ? load_word_acquire(bulk_growth(connection)) : own.y;
  task.announced = own.y != 0;
  task.seen = 0;
  task.published = task.pushed = task.stored = task.operation = task.step = 0;
  task.connection = (uint16_t)connection_index;
  task.channel = (uint16_t)channel;
  task.tellers = receive || connection.flags & WINDLASS_CONNECTION_ORDINARY_STORES ? block.copy_warps : 1;
  const uint64_t stride = (uint64_t)group.geometry().bulk_channels * group.geometry().bulk_chunk_bytes;
  const uint64_t first = (uint64_t)channel * group.geometry().bulk_chunk_bytes;
  uint32_t total = 0;
  for (uint32_t i = 0; i < connection.operations; ++i) {
    const Message message = group.message(connection.first_operation + i);
    if (message.blocks == 0 && message.bytes > first) total += (uint32_t)((message.bytes - first + stride - 1) / stride);
  }
  task.total = total;
  // Chunks that a copy warp may send with a credit of zero.
  const uint64_t slots = group.geometry().bulk_slots, at_first = slots > task.base ? slots - task.base : 0;
  task.gate = task.grown ? gate_closed : (uint32_t)(at_first < total ? at_first : total);
  for (uint32_t copy_warp = 0; copy_warp < block.copy_warps; ++copy_warp) *block.teller(index, copy_warp) = 0;
}

// --- copy warps -----------------------------------------------------------------------------------------------------------

WINDLASS_DEVICE void take_gate(const BulkTask& task, uint32_t gate, Job& job) {
  if (!(gate & gate_closed)) return;
  job.from = task.base + (gate & ~gate_closed);
  job.grown = task.grown;
}

WINDLASS_DEVICE void begin_bulk_job(const Group& group, const BulkBlock& block, const WindlassP2pConnection& connection, Job& job) {
  const BulkTask& task = block.tasks[job.task];
  job.count = task.base;
  job.seen = 0;
  job.from = from_none;
  job.grown = 0;
  take_gate(task, told(&block.tasks[job.task].gate), job);
  Piece piece;
  job.live = find_piece(group, connection, true, job.channel, 0, job.operation, job.step, piece);
}

WINDLASS_DEVICE void finish_part(const Group& group, const BulkBlock& block, const WindlassP2pConnection& connection, uint32_t copy_warp,
                             Job& job) {
  ++job.count;
  ++job.step;
  // Orders all lanes' copies before lane 0's release in `tell`.
  sync_warp();
  if (lane_index() == 0) tell(block.teller(job.task, copy_warp), (uint32_t)(job.count - block.tasks[job.task].base));
  Piece next;
  job.live = find_piece(group, connection, true, job.channel, 0, job.operation, job.step, next);
}

// So that 14 copy warps copy a chunk of 64 KiB in two rounds: a round takes some 1.5 us, and the wire 4.3 for a chunk with 24 blocks.
constexpr uint32_t vectors_in_flight = 5;

// The posted word says that the channel moves: learns from which chunk on, before the warp takes any chunk. False: not known yet.
WINDLASS_DEVICE bool follow_bulk_channel(const BulkBlock& block, const WindlassP2pConnection& connection, Job& job) {
  if (job.grown) return true;
  const Move move = followed_move(bulk_from(connection, job.channel), bulk_growth(connection));
  if (!move.grown) return false;
  job.from = move.from;
  job.grown = move.grown;
  // For the signal warp, which keeps the ring for the next launch.
  if (lane_index() == 0) tell(&block.tasks[job.task].gate, gate_closed);
  return true;
}

// Copies this copy warp's part of the next chunk out of its slot. True if the chunk was there.
WINDLASS_DEVICE bool step_bulk_receive(const Group& group, const BulkBlock& block, const WindlassP2pConnection& connection,
                                   uint32_t copy_warp, Job& job) {
  if (job.seen <= job.count) {
    // Lane 0 acquires for the warp. The shuffle in from_first_lane orders no memory, so sync_warp orders all lanes' loads behind it.
    const uint64_t posted = load_word_for_warp(bulk_word(connection.bulk_posted, job.channel));
    sync_warp();
    if (posted & WINDLASS_POSTED_MOVES && !follow_bulk_channel(block, connection, job)) return false;
    job.seen = posted & ~WINDLASS_POSTED_MOVES;
    if (job.seen <= job.count) return false;
  }
  Piece piece;
  find_piece(group, connection, true, job.channel, 0, job.operation, job.step, piece);
  const char* const from = bulk_slot(group, connection, job.channel, job.count, job.from, job.grown);
  char* const to = reinterpret_cast<char*>(piece.address + piece.offset);
  const uint32_t width = access_width(piece.address);
  const uint32_t vectors = (piece.bytes + 15) / 16, stride = block.copy_warps * 32;
  for (uint32_t first = copy_warp * 32 + lane_index(); first < vectors; first += stride * vectors_in_flight) {
    Vector v[vectors_in_flight];
    WINDLASS_UNROLL
    for (uint32_t i = 0; i < vectors_in_flight; ++i)
      if (first + i * stride < vectors) v[i] = load_slot(from + (uint64_t)(first + i * stride) * 16);
    WINDLASS_UNROLL
    for (uint32_t i = 0; i < vectors_in_flight; ++i) {
      const uint32_t at = (first + i * stride) * 16;
      if (at < piece.bytes) {
        if (width == 16 && at + 16 <= piece.bytes)
          store_output(to + at, v[i]);
        else
          store_narrow(to + at, v[i], piece.bytes - at < 16 ? piece.bytes - at : 16, width);
      }
    }
  }
  // The signal warp may give credit only now: the values were stored, so their loads have returned. A credit that leaves while
  // a load without a consumer is in flight lets the sender overwrite the slot under that load.
  finish_part(group, block, connection, copy_warp, job);
  return true;
}

// Returns the gate, for one thread of a copy warp that sends, is at chunk `count` and has just read `credit`. The copy warps of a block
// proceed independently, each with the credit that it has seen. So the gate decides where the channel moves: a copy warp raises it before
// it uses the first ring, and copy warp 0 closes it. Not inlined: the registers are needed elsewhere.
WINDLASS_DEVICE_FUNCTION uint32_t pass_gate(BulkTask* task, uint64_t count, uint64_t credit, uint32_t slots, uint64_t growth_word) {
  if (count - credit < slots) {
    // Not beyond this launch's chunks: a move ahead of the launch's end would be forgotten.
    const uint64_t reach = credit + slots - task->base;
    return raise(&task->gate, reach < task->total ? (uint32_t)reach : task->total);
  }
  const uint32_t gate = told(&task->gate);
  if (!growth_word || gate & gate_closed) return gate;
  const uint64_t grown = load_word_acquire(growth_word);
  if (!grown) return gate;
  task->grown = grown;
  return set_bits(&task->gate, gate_closed) | gate_closed;
}

// Whether the next chunk has room. `look`: if not, copy warp 0 looks for a larger ring.
WINDLASS_DEVICE bool has_part_room(const Group& group, const BulkBlock& block, const WindlassP2pConnection& connection, uint32_t copy_warp,
                               Job& job, bool look) {
  const uint32_t slots = group.geometry().bulk_slots;
  if (job.count - job.seen < slots_at(slots, job.from, job.grown, job.count)) return true;
  BulkTask* const task = block.tasks + job.task;
  uint64_t credit = 0;
  uint32_t gate = 0;
  if (lane_index() == 0) {
    credit = load_word_acquire(bulk_word(connection.bulk_credit, job.channel));
    if (job.from == from_none) gate = pass_gate(task, job.count, credit, slots, look && copy_warp == 0 ? bulk_growth(connection) : 0);
  }
  job.seen = from_first_lane(credit);
  gate = (uint32_t)from_first_lane(gate);
  sync_warp();
  if (job.from == from_none) take_gate(*task, gate, job);
  return job.count - job.seen < slots_at(slots, job.from, job.grown, job.count);
}

// Copies this copy warp's part of the next chunk into its slot by ordinary stores. True if there was room.
WINDLASS_DEVICE bool step_bulk_send(const Group& group, const BulkBlock& block, const WindlassP2pConnection& connection,
                                uint32_t copy_warp, Job& job, bool look) {
  if (!has_part_room(group, block, connection, copy_warp, job, look)) return false;
  Piece piece;
  find_piece(group, connection, true, job.channel, 0, job.operation, job.step, piece);
  const char* const from = reinterpret_cast<const char*>(piece.address + piece.offset);
  char* const to = bulk_slot(group, connection, job.channel, job.count, job.from, job.grown);
  const uint32_t width = access_width(piece.address);
  const uint32_t vectors = (piece.bytes + 15) / 16, stride = block.copy_warps * 32;
  for (uint32_t first = copy_warp * 32 + lane_index(); first < vectors; first += stride * vectors_in_flight) {
    Vector v[vectors_in_flight];
    WINDLASS_UNROLL
    for (uint32_t i = 0; i < vectors_in_flight; ++i) {
      const uint32_t at = (first + i * stride) * 16;
      if (at < piece.bytes)
        v[i] = width == 16 && at + 16 <= piece.bytes
                   ? load_input(from + at)
                   : load_narrow(from + at, piece.bytes - at < 16 ? piece.bytes - at : 16, width);
    }
    WINDLASS_UNROLL
    for (uint32_t i = 0; i < vectors_in_flight; ++i)
      if (first + i * stride < vectors) store_slot(to + (uint64_t)(first + i * stride) * 16, v[i]);
  }
  finish_part(group, block, connection, copy_warp, job);
  return true;
}

// --- the signal warp -------------------------------------------------------------------------------------------------------

// The grown ring's word if the next launch goes on there, else 0.
WINDLASS_DEVICE uint64_t ring_at_end(const BulkTask& task, uint32_t gate, const WindlassP2pConnection& connection, bool send) {
  if (task.announced || !(gate & gate_closed)) return task.announced ? task.grown : 0;
  // A receiver has learnt of a move in this launch. If the move lies ahead of the launch's end, the next launch asks again.
  const uint64_t from = send ? 0 : load_word_acquire(bulk_from(connection, task.channel));
  return from && task.base + task.total >= from - 1 ? load_word_acquire(bulk_growth(connection)) : 0;
}

// Each lane looks after tasks lane, lane + 32, ...
WINDLASS_DEVICE void run_signal_warp(const Group& group, const BulkBlock& block) {
  uint32_t idle = 0;
  for (;;) {
    bool unfinished = false, moved = false;
    for (uint32_t first = 0; first < block.count(); first += 32) {
      const uint32_t index = first + lane_index();
      const bool mine = index < block.count();
      uint32_t done = 0, published = 0;
      if (mine) {
        const BulkTask& task = block.tasks[index];
        published = task.published;
        done = task.total;
        for (uint32_t copy_warp = 0; copy_warp < task.tellers; ++copy_warp) {
          const uint32_t one = told(block.teller(index, copy_warp));
          done = one < done ? one : done;
        }
      }
      const bool news = done > published;
      if (any_of_warp(news)) {
        moved = true;
        // Stores where the channel moves, before the posted word that says so (the fence is below). The gate is read after the
        // counters: a warp that told of a chunk in the grown ring had found the gate closed.
        if (news && index < block.send_tasks && !block.tasks[index].announced) {
          BulkTask& task = block.tasks[index];
          const uint32_t gate = told(&task.gate);
          if (gate & gate_closed) {
            store_word(bulk_from(group.connection(task.connection), task.channel), task.base + (gate & ~gate_closed) + 1);
            task.announced = 1;
          }
        }
        // Orders the chunks that `told` acquired before the posted words, for the peer. Completion of the TMA producer's copies is not
        // arrival at the peer: without this fence a receiver read old bytes. (For credit alone no fence would be needed.)
        if (any_of_warp(news && index < block.send_tasks)) fence_system();
        if (news) {
          BulkTask& task = block.tasks[index];
          const WindlassP2pConnection connection = group.connection(task.connection);
          const bool send = index < block.send_tasks;
          const uint64_t moves = send && task.announced ? WINDLASS_POSTED_MOVES : 0;
          store_word(bulk_word(send ? connection.bulk_posted : connection.bulk_credit, task.channel), (task.base + done) | moves);
          task.published = done;
          if (done == task.total)
            store_own_words(connection.bulk_progress + task.channel * WINDLASS_PROGRESS_STRIDE,
                            Vector{task.base + done, ring_at_end(task, told(&task.gate), connection, send)});
        }
      }
      unfinished |= mine && done < block.tasks[index].total;
    }
    if (!any_of_warp(unfinished)) return;
    if (moved) {
      idle = 0;
    } else {
      pause_thread();
      if (++idle % rounds_between_looks == 0 && any_of_warp(group.ended())) return;
    }
  }
}

// --- the TMA producer -------------------------------------------------------------------------------------------------------
#if WINDLASS_HAS_BULK_COPIES

// One thread. Chunks of all channels pass through `stages` places of shared memory in the order in which they were loaded. A
// chunk is loaded only when its channel has room for it, so no loaded chunk ever waits for a peer, and no channel waits behind
// another. If no channel has room, the TMA producer completes and tells all chunks under way before it polls: the credit that
// it waits for may depend on them.
struct TmaProducer {
  const Group& group;
  const BulkBlock& block;
  char* stages;
  Barrier* barriers;
  Order* orders;
  uint32_t loaded = 0, stored = 0, told_stored = 0;  // chunks, over all channels
  uint32_t unfinished = 0;                           // channels with chunks left to load
  uint32_t turn = 0;

  WINDLASS_DEVICE bool served_here(uint32_t index) const {
    return !(group.connection(block.tasks[index].connection).flags & WINDLASS_CONNECTION_ORDINARY_STORES);
  }

  // The first chunk in the grown ring; the TMA producer alone closes the gates of its channels.
  WINDLASS_DEVICE static uint64_t from_of(BulkTask& task) {
    const uint32_t gate = told(&task.gate);
    return gate & gate_closed ? task.base + (gate & ~gate_closed) : from_none;
  }

  WINDLASS_DEVICE bool has_room(BulkTask& task, const WindlassP2pConnection& connection, bool look) {
    const uint64_t count = task.base + task.pushed, from = from_of(task);
    const uint64_t slots = slots_at(group.geometry().bulk_slots, from, task.grown, count);
    if (count - task.seen < slots) return true;
    task.seen = load_word_acquire(bulk_word(connection.bulk_credit, task.channel));
    if (count - task.seen < slots) return true;
    if (!look || from != from_none) return false;
    const uint64_t grown = load_word_acquire(bulk_growth(connection));
    if (!grown) return false;
    task.grown = grown;
    tell(&task.gate, gate_closed | task.pushed);
    return true;
  }

  // Begins to load a chunk of the next channel that has room, after at most one look at each. False: no channel has. `look`: for a
  // channel without room, look for a larger ring.
  WINDLASS_DEVICE bool load_one(bool look) {
    for (uint32_t asked = 0; asked < block.send_tasks; ++asked) {
      const uint32_t index = turn;
      turn = turn + 1 < block.send_tasks ? turn + 1 : 0;
      BulkTask& task = block.tasks[index];
      if (task.pushed == task.total || !served_here(index)) continue;
      const WindlassP2pConnection connection = group.connection(task.connection);
      if (!has_room(task, connection, look)) continue;

      Piece piece;
      find_piece(group, connection, true, task.channel, 0, task.operation, task.step, piece);
      const uint32_t stage_count = group.launch.stages, stage = loaded % stage_count;
      // The stage is free: fewer than half of the stages are loaded and not stored, at most half stored and not complete.
      char* const at = stages + (uint64_t)stage * group.geometry().bulk_chunk_bytes;
      const char* const from = reinterpret_cast<const char*>(piece.address + piece.offset);
      const uint32_t whole = piece.bytes & ~15u;
      bulk_load(at, from, whole, barriers + stage);
      if (whole < piece.bytes) {
        // The message's last bytes that fill no vector.
        for (uint32_t i = whole; i < piece.bytes; ++i) at[i] = load_piece<char>(from + i);
        fence_stage();
      }
      char* const slot = bulk_slot(group, connection, task.channel, task.base + task.pushed, from_of(task), task.grown);
      orders[stage] = Order{reinterpret_cast<uint64_t>(slot), piece.bytes, index};
      ++loaded;
      ++task.step;
      if (++task.pushed == task.total) --unfinished;
      return true;
    }
    return false;
  }

  WINDLASS_DEVICE void store_one() {
    const uint32_t stage = stored % group.launch.stages;
    while (!barrier_passed(barriers + stage, stored / group.launch.stages & 1)) pause_thread();
    const Order& order = orders[stage];
    // Up to 15 bytes more than the message has: the slot holds nothing else, and the receiver knows the message's size.
    bulk_store(reinterpret_cast<char*>(order.slot), stages + (uint64_t)stage * group.geometry().bulk_chunk_bytes,
               (order.bytes + 15) & ~15u);
    ++stored;
  }

  // Waits until all but the `left` newest stores are complete, and tells the signal warp.
  WINDLASS_DEVICE void complete(uint32_t left) {
    wait_stores(left);
    for (; told_stored < stored - left; ++told_stored) {
      const uint32_t index = orders[told_stored % group.launch.stages].task;
      tell(block.teller(index, 0), ++block.tasks[index].stored);
    }
  }

  WINDLASS_DEVICE void report_stuck() {
    for (uint32_t index = 0; index < block.send_tasks; ++index) {
      const BulkTask& task = block.tasks[index];
      if (task.pushed == task.total || !served_here(index)) continue;
      report_wait(group, group.connection(task.connection).peer, WINDLASS_WAITED_BULK_CREDIT, task.channel, task.operation,
                  task.base + task.pushed, task.seen);
      return;
    }
  }

  WINDLASS_DEVICE void request_growth_of_tasks() {
    for (uint32_t index = 0; index < block.send_tasks; ++index) {
      BulkTask& task = block.tasks[index];
      if (task.pushed < task.total && served_here(index) && from_of(task) == from_none)
        request_growth(group, group.connection(task.connection).peer, WINDLASS_GROWTH_BULK);
    }
  }

  WINDLASS_DEVICE void run() {
    for (uint32_t index = 0; index < block.send_tasks; ++index)
      if (block.tasks[index].total && served_here(index)) ++unfinished;
    const uint32_t ahead = group.launch.stages / 2, under_way = group.launch.stages / 2;
    // Unsuccessful rounds: in a row, and in all. A small ring may be slow without ever being full for long.
    uint32_t idle = 0, vain = 0;
    bool look = false;
    while (unfinished || told_stored < loaded) {
      while (unfinished && loaded - stored < ahead && load_one(look)) {
      }
      look = false;
      if (stored < loaded) {
        store_one();
        if (stored - told_stored > under_way) complete(under_way);
        idle = 0;
      } else if (told_stored < stored) {
        complete(0);
      } else {
        pause_thread();
        look = ++vain % rounds_between_looks == 0;
        if (++idle % rounds_between_looks) continue;
        if (idle % rounds_before_request == 0) request_growth_of_tasks();
        if (group.aborted()) {
          // No copy is under way here, so shared memory may go to another block.
          report_stuck();
          return;
        }
      }
    }
  }
};
#endif

// LL128 channels: one warp to one warp, a ring of packets, no fence. A packet is there when its tag is. The tag of a channel's packet
// number n is first_tag + n and never comes again, so a slot needs no cleaning; n % slots is its slot. Therefore a receiver
// that does not know yet that the channel has moved only waits in the first ring, and takes no wrong packet.
//
// Invariant: credit <= received <= sent <= credit + slots. The sender keeps the last inequality by reading credit, the
// receiver the first one by giving credit only for packets whose loads have returned.
#pragma once
#include "job.cuh"
#include "packet.cuh"

// Finds where the channel's slots are, once for many packets; again when `count` has come to `from`.
WINDLASS_DEVICE void find_ll128_slots(const Group& group, const WindlassP2pConnection& connection, Job& job) {
  const bool moved = job.count >= job.from;
  const uint64_t slots = moved ? ring_slots(job.grown) : group.geometry().ll128_slots;
  job.slots = (moved ? ring_address(job.grown) : connection.ll128_ring) + job.channel * slots * WINDLASS_PACKET_SLOT_BYTES;
  job.slot_mask = (uint32_t)slots - 1;
}
WINDLASS_DEVICE char* ll128_slot(const Job& job) {
  return reinterpret_cast<char*>(job.slots + (uint64_t)((uint32_t)job.count & job.slot_mask) * WINDLASS_PACKET_SLOT_BYTES);
}
WINDLASS_DEVICE uint64_t ll128_from(const WindlassP2pConnection& connection, const Job& job) {
  return connection.ll128_from + job.channel * WINDLASS_LL128_FROM_STRIDE;
}

// Ends the job after the channel's last packet of this group: stores from where the next launch goes on.
WINDLASS_DEVICE void end_ll128_job(const WindlassP2pConnection& connection, Job& job) {
  job.live = false;
  // A receiver may know of a move ahead of the launch's end: then the next launch asks again.
  const uint64_t ring = job.count >= job.from ? job.grown : 0;
  if (lane_index() == 0)
    store_own_words(connection.ll128_progress + job.channel * WINDLASS_PROGRESS_STRIDE, Vector{job.count, ring});
}

WINDLASS_DEVICE void begin_ll128_job(const Group& group, const WindlassP2pConnection& connection, Job& job) {
  const uint64_t progress = connection.ll128_progress + job.channel * WINDLASS_PROGRESS_STRIDE;
  const uint64_t credit = connection.ll128_credit + job.channel * WINDLASS_LL128_WORD_STRIDE;
  const Vector own = load_own_words(progress);
  job.count = own.x;
  job.grown = own.y;
  job.from = own.y ? 0 : from_none;
  find_ll128_slots(group, connection, job);
  // Loaded now, beside the progress word, so that a sender need not wait for it a moment later.
  job.seen = job.kind == job_ll128_send ? load_word_relaxed(credit) : 0;
  Piece piece;
  job.live = find_piece(group, connection, false, job.channel, job.round, job.operation, job.step, piece);
}

// If the host has told of a larger ring, moves the channel: packet `count`, the next, is the first there. Returns the ring's word, or 0.
WINDLASS_DEVICE_FUNCTION uint64_t move_ll128_channel(uint64_t from_word, uint64_t growth_word, uint64_t count) {
  const uint64_t grown = load_word_for_warp(growth_word);
  if (grown && lane_index() == 0) {
    // Orders the acquired growth word before `from`: a receiver that acquires `from` finds its own growth word, too (followed_move).
    fence_system();
    store_word(from_word, count + 1);
  }
  return grown;
}
WINDLASS_DEVICE uint64_t ll128_growth(const WindlassP2pConnection& connection) { return connection.growth + 8 * WINDLASS_GROWTH_LL128; }
WINDLASS_DEVICE bool move_ll128_job(const Group& group, const WindlassP2pConnection& connection, Job& job) {
  if (job.grown) return false;
  job.grown = move_ll128_channel(ll128_from(connection, job), ll128_growth(connection), job.count);
  if (!job.grown) return false;
  job.from = job.count;
  find_ll128_slots(group, connection, job);
  return true;
}

// For a receiver whose polls find nothing: learns of the sender's move. Called now and then.
WINDLASS_DEVICE void follow_ll128_job(const Group& group, const WindlassP2pConnection& connection, Job& job) {
  if (job.grown) return;
  const Move move = followed_move(ll128_from(connection, job), ll128_growth(connection));
  job.from = move.from;
  job.grown = move.grown;
  find_ll128_slots(group, connection, job);
}

// Whether the next packet has room. All lanes use lane 0's value of the credit, as different credits would make them diverge.
// `look`: if there is no room, look for a larger ring.
WINDLASS_DEVICE bool has_ll128_room(const Group& group, const WindlassP2pConnection& connection, Job& job, bool look) {
  job.seen = from_first_lane(job.seen);
  if (job.count - job.seen <= job.slot_mask) return true;
  // A relaxed load is enough: the packet's stores depend on it by the branch (A2), and the receiver's loads from the slot had
  // returned before it stored the credit.
  job.seen = from_first_lane(load_word_relaxed(connection.ll128_credit + job.channel * WINDLASS_LL128_WORD_STRIDE));
  return job.count - job.seen <= job.slot_mask || (look && move_ll128_job(group, connection, job));
}

WINDLASS_DEVICE void load_next(const Group& group, const WindlassP2pConnection& connection, Job& job, Packet& packet, Piece& piece) {
  find_piece(group, connection, false, job.channel, job.round, job.operation, job.step, piece);
  load_payload(packet, reinterpret_cast<const char*>(piece.address + piece.offset), piece.bytes, access_width(piece.address));
}

WINDLASS_DEVICE void send_loaded(const Group& group, const WindlassP2pConnection& connection, Job& job, const Packet& packet, Piece& piece) {
  send_packet(ll128_slot(job), packet, piece.bytes, group.geometry().first_tag + job.count);
  ++job.count;
  ++job.step;
  if (!find_piece(group, connection, false, job.channel, job.round, job.operation, job.step, piece)) end_ll128_job(connection, job);
}

// True if a packet was moved.
WINDLASS_DEVICE bool step_ll128_send(const Group& group, const WindlassP2pConnection& connection, Job& job, bool look) {
  if (!has_ll128_room(group, connection, job, look)) return false;
  Packet packet;
  Piece piece;
  load_next(group, connection, job, packet, piece);
  send_loaded(group, connection, job, packet, piece);
  return true;
}

// Polls once for `piece`, the job's next. True if it was there; `piece` is then the one after it.
WINDLASS_DEVICE bool receive_found(const Group& group, const WindlassP2pConnection& connection, Job& job, Piece& piece) {
  Packet packet;
  if (!receive_packet(packet, ll128_slot(job), piece.bytes, group.geometry().first_tag + job.count)) return false;
  const Piece here = piece;
  if (++job.count == job.from) find_ll128_slots(group, connection, job);
  ++job.step;
  const bool last = !find_piece(group, connection, false, job.channel, job.round, job.operation, job.step, piece);
  // Credit may go out before the payload is stored: the vote over the tags has waited for the loads of the whole warp (A2).
  // It goes out not for each packet, as a sender seldom waits for the newest; always for the last, as the next group may be far away.
  const uint32_t slots = group.geometry().ll128_slots;
  const uint32_t every = slots >= 4 ? slots / 4 : 1;
  if (last || (job.count & (every - 1)) == 0) {
    sync_warp();
    if (lane_index() == 0) store_word(connection.ll128_credit + job.channel * WINDLASS_LL128_WORD_STRIDE, job.count);
  }
  store_payload(reinterpret_cast<char*>(here.address + here.offset), packet, here.bytes, access_width(here.address));
  if (last) end_ll128_job(connection, job);
  return true;
}

WINDLASS_DEVICE bool step_ll128_receive(const Group& group, const WindlassP2pConnection& connection, Job& job, bool look) {
  Piece piece;
  find_piece(group, connection, false, job.channel, job.round, job.operation, job.step, piece);
  if (receive_found(group, connection, job, piece)) return true;
  if (look) follow_ll128_job(group, connection, job);
  return false;
}

// Line lanes: one warp to one warp, a ring of units, no fence. A unit is there when its tag is. The tag of a lane's unit
// number n is first_tag + n and never comes again, so a slot needs no cleaning; n % slots is its slot.
//
// Invariant: credit <= received <= sent <= credit + slots. The sender holds the last part by looking at credit, the
// receiver the first by giving credit only for units whose loads have returned.
#pragma once
#include "job.cuh"
#include "unit.cuh"

MAIL_DEVICE char* line_slot(const Group& group, const WindlassMailChannel& channel, const Job& job) {
  const uint32_t slots = group.geometry().line_slots;
  const uint64_t slot = (uint64_t)job.lane * slots + (job.count & (slots - 1));
  return reinterpret_cast<char*>(channel.line_ring + slot * WINDLASS_UNIT_SLOT_BYTES);
}

// The lane's last unit of this group is done: the next launch goes on from here.
MAIL_DEVICE void end_line_job(const WindlassMailChannel& channel, Job& job) {
  job.live = false;
  if (lane_index() == 0) store_own_word(channel.line_progress + job.lane * WINDLASS_PROGRESS_STRIDE, job.count);
}

MAIL_DEVICE void begin_line_job(const Group& group, const WindlassMailChannel& channel, Job& job) {
  const uint64_t progress = channel.line_progress + job.lane * WINDLASS_PROGRESS_STRIDE;
  const uint64_t credit = channel.line_credit + job.lane * WINDLASS_LINE_WORD_STRIDE;
  job.count = load_own_word(progress);
  // Read now, beside the progress word, so that a sender need not wait for it a moment later.
  job.seen = job.kind == job_line_send ? load_word_relaxed(credit) : 0;
  Piece piece;
  job.live = find_piece(group, channel, false, job.lane, job.operation, job.step, piece);
}

// May the next unit go? One thread's value of the credit for all: threads that see different credits would part ways.
MAIL_DEVICE bool has_line_room(const Group& group, const WindlassMailChannel& channel, Job& job) {
  const uint64_t slots = group.geometry().line_slots;
  job.seen = from_first_lane(job.seen);
  if (job.count - job.seen < slots) return true;
  // Relaxed is enough here: the stores that follow depend on the branch, and the receiver's loads had returned before it
  // gave the credit.
  job.seen = from_first_lane(load_word_relaxed(channel.line_credit + job.lane * WINDLASS_LINE_WORD_STRIDE));
  return job.count - job.seen < slots;
}

MAIL_DEVICE void load_next(const Group& group, const WindlassMailChannel& channel, Job& job, Unit& unit, Piece& piece) {
  find_piece(group, channel, false, job.lane, job.operation, job.step, piece);
  load_payload(unit, reinterpret_cast<const char*>(piece.address + piece.offset), piece.bytes, access_width(piece.address));
}

MAIL_DEVICE void send_loaded(const Group& group, const WindlassMailChannel& channel, Job& job, const Unit& unit, Piece& piece) {
  send_unit(line_slot(group, channel, job), unit, piece.bytes, group.geometry().first_tag + job.count);
  ++job.count;
  ++job.step;
  if (!find_piece(group, channel, false, job.lane, job.operation, job.step, piece)) end_line_job(channel, job);
}

// True if a unit was moved.
MAIL_DEVICE bool step_line_send(const Group& group, const WindlassMailChannel& channel, Job& job) {
  if (!has_line_room(group, channel, job)) return false;
  Unit unit;
  Piece piece;
  load_next(group, channel, job, unit, piece);
  send_loaded(group, channel, job, unit, piece);
  return true;
}

// One look at `piece`, the job's next. True if it was there; then `piece` is the one after it.
MAIL_DEVICE bool receive_found(const Group& group, const WindlassMailChannel& channel, Job& job, Piece& piece) {
  Unit unit;
  if (!receive_unit(unit, line_slot(group, channel, job), piece.bytes, group.geometry().first_tag + job.count)) return false;
  const Piece here = piece;
  ++job.count;
  ++job.step;
  const bool last = !find_piece(group, channel, false, job.lane, job.operation, job.step, piece);
  // Credit may go out before the payload is stored: the vote over the tags has waited for the loads of the whole warp.
  // Not for each unit, as a sender seldom waits for the newest; always for the last, as the next group may be far away.
  const uint32_t slots = group.geometry().line_slots;
  const uint32_t every = slots >= 4 ? slots / 4 : 1;
  if (last || (job.count & (every - 1)) == 0) {
    sync_warp();
    if (lane_index() == 0) store_word(channel.line_credit + job.lane * WINDLASS_LINE_WORD_STRIDE, job.count);
  }
  store_payload(reinterpret_cast<char*>(here.address + here.offset), unit, here.bytes, access_width(here.address));
  if (last) end_line_job(channel, job);
  return true;
}

MAIL_DEVICE bool step_line_receive(const Group& group, const WindlassMailChannel& channel, Job& job) {
  Piece piece;
  find_piece(group, channel, false, job.lane, job.operation, job.step, piece);
  return receive_found(group, channel, job, piece);
}

// Tests the p2p transport kernel of ../device, compiled for the host: ranks are threads of one process and share the memory of their heaps.
// Usage: p2p_test SCENARIO [SEED]. Prints the seed; exits 0 only if every byte arrived and none beside it was touched.
#include "../device/group.cuh"
#include "arrange.h"
#include "residency.h"

#include <unistd.h>

#include <chrono>
#include <string>

namespace {

host::Machine machine;
uint64_t seed;

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "FAILED (seed %llu): %s\n", (unsigned long long)seed, what.c_str());
  std::fflush(stderr);
  _exit(1);
}
void expect(bool condition, const std::string& what) {
  if (!condition) fail(what);
}

// --- a communicator -----------------------------------------------------------------------------------------------------

struct Options {
  uint32_t ranks = 2;
  uint32_t ll128_channels = 4, ll128_slots = 4, bulk_channels = 2, bulk_slots = 4, chunk = 4096;
  uint64_t bulk_from = 40000;
  uint64_t first_tag = 1;
  uint64_t first_count = 0;  // packets and chunks that every channel has counted before the first call
  uint32_t stages = 4;
  bool bulk_copies = true;
  uint32_t strayed_rank = ~0u;  // this rank serves its channels by other virtual blocks than its peers do
};

// Memory that is 128-byte aligned and zeroed, as a region at init.
struct Region {
  std::vector<uint64_t> words;
  uint64_t address = 0;
  void make(size_t bytes) {
    words.assign(bytes / 8 + 17, 0);
    address = (reinterpret_cast<uint64_t>(words.data()) + 127) & ~127ull;
  }
};

struct Directed {  // sender -> receiver
  Region ll128_ring, bulk_ring, posted;            // in the receiver's symmetric heap
  Region ll128_credit, bulk_credit;                // in the sender's
  Region ll128_progress[2], bulk_progress[2];      // each side's own
  Region ll128_from;                               // in the receiver's
  Region growth[2];                               // each side's own, in host memory
  Region grown[2];                                // the larger rings, by wire; in the receiver's symmetric heap, none at init
  uint64_t told[2] = {};                         // the growth words for them
};

struct World {
  Options options;
  WindlassP2pGeometry geometry;
  std::vector<Directed> pairs;
  std::vector<std::vector<P2pPeer>> peers;  // [rank][peer]
  uint32_t control = 0;
  std::vector<WindlassP2pReport> reports;
  std::vector<std::vector<uint8_t>> growth_requests;  // [rank]
  residency::Gpus* gpus = nullptr;           // null: all blocks are resident

  explicit World(const Options& o) : options(o), pairs(o.ranks * o.ranks), peers(o.ranks), reports(o.ranks), growth_requests(o.ranks, std::vector<uint8_t>(2 * WINDLASS_GROWTH_REQUESTS_PER_WIRE)) {
    expect(o.ll128_channels % o.bulk_channels == 0, "as many LL128 channels for each virtual block");
    geometry = {o.first_tag, o.bulk_from, o.ll128_channels, o.ll128_slots, o.bulk_channels, o.bulk_slots, o.chunk, 0};
    for (auto& list : peers) list.resize(o.ranks);
    std::memset(reports.data(), 0, reports.size() * sizeof(WindlassP2pReport));
    for (uint32_t from = 0; from < o.ranks; ++from)
      for (uint32_t to = 0; to < o.ranks; ++to) {
        if (from == to) continue;
        Directed& pair = pairs[from * o.ranks + to];
        pair.ll128_ring.make((size_t)o.ll128_channels * o.ll128_slots * WINDLASS_PACKET_SLOT_BYTES);
        pair.bulk_ring.make((size_t)o.bulk_channels * o.bulk_slots * o.chunk);
        pair.posted.make(o.bulk_channels * WINDLASS_BULK_WORD_STRIDE);
        pair.ll128_credit.make(o.ll128_channels * WINDLASS_LL128_WORD_STRIDE);
        pair.bulk_credit.make(o.bulk_channels * WINDLASS_BULK_WORD_STRIDE);
        for (int side = 0; side < 2; ++side) {
          pair.ll128_progress[side].make(o.ll128_channels * WINDLASS_PROGRESS_STRIDE);
          pair.bulk_progress[side].make(o.bulk_channels * WINDLASS_PROGRESS_STRIDE);
          for (uint32_t i = 0; i < o.ll128_channels; ++i) word(pair.ll128_progress[side].address + i * WINDLASS_PROGRESS_STRIDE) = o.first_count;
          for (uint32_t i = 0; i < o.bulk_channels; ++i) word(pair.bulk_progress[side].address + i * WINDLASS_PROGRESS_STRIDE) = o.first_count;
          pair.growth[side].make(16);
        }
        pair.ll128_from.make(o.ll128_channels * WINDLASS_LL128_FROM_STRIDE);
        for (uint32_t i = 0; i < o.ll128_channels; ++i) word(pair.ll128_credit.address + i * WINDLASS_LL128_WORD_STRIDE) = o.first_count;
        for (uint32_t i = 0; i < o.bulk_channels; ++i) {
          word(pair.bulk_credit.address + i * WINDLASS_BULK_WORD_STRIDE) = o.first_count;
          word(pair.posted.address + i * WINDLASS_BULK_WORD_STRIDE) = o.first_count;
        }
        WindlassP2pConnection connection = {};
        connection.ll128_ring = pair.ll128_ring.address;
        connection.ll128_credit = pair.ll128_credit.address;
        connection.bulk_ring = pair.bulk_ring.address;
        connection.bulk_posted = pair.posted.address;
        connection.bulk_credit = pair.bulk_credit.address;
        connection.ll128_from = pair.ll128_from.address;
        connection.ll128_progress = pair.ll128_progress[0].address;
        connection.bulk_progress = pair.bulk_progress[0].address;
        connection.growth = pair.growth[0].address;
        connection.peer = to;
        peers[from][to].send = connection;
        connection.ll128_progress = pair.ll128_progress[1].address;
        connection.bulk_progress = pair.bulk_progress[1].address;
        connection.growth = pair.growth[1].address;
        connection.peer = from;
        peers[to][from].receive = connection;
      }
  }
  Directed& pair(uint32_t from, uint32_t to) { return pairs[from * options.ranks + to]; }

  // Does what the two hosts do: the receiver's host makes a ring and tells its kernels, then the sender's host tells its own kernels.
  void make_growth(uint32_t from, uint32_t to, uint32_t wire, uint32_t slots) {
    Directed& directed = pair(from, to);
    expect(directed.grown[wire].address == 0 && (slots & (slots - 1)) == 0, "a ring grows once, to a power of two");
    const uint32_t channel_bytes = slots * (wire == WINDLASS_GROWTH_BULK ? options.chunk : (uint32_t)WINDLASS_PACKET_SLOT_BYTES);
    directed.grown[wire].make((size_t)channel_bytes * (wire == WINDLASS_GROWTH_BULK ? options.bulk_channels : options.ll128_channels));
    // The new ring may hold anything.
    host::Random anything{seed ^ from ^ to << 8 ^ wire << 16};
    for (uint64_t& word : directed.grown[wire].words) word = anything.next();
    directed.told[wire] = directed.grown[wire].address | (uint64_t)__builtin_ctz(slots);
  }
  void tell_growth(uint32_t from, uint32_t to, uint32_t wire, uint32_t side) {
    Directed& directed = pair(from, to);
    __atomic_store_n(&word(directed.growth[side].address + 8 * wire), directed.told[wire], __ATOMIC_RELEASE);
  }
  void grow(uint32_t from, uint32_t to, uint32_t wire, uint32_t slots, uint32_t between_microseconds = 0) {
    make_growth(from, to, wire, slots);
    tell_growth(from, to, wire, 1);
    if (between_microseconds) usleep(between_microseconds);
    tell_growth(from, to, wire, 0);
  }
  uint32_t first_slots(uint32_t wire) const { return wire == WINDLASS_GROWTH_BULK ? options.bulk_slots : options.ll128_slots; }
  bool has_request(uint32_t rank, uint32_t peer, uint32_t wire) {
    return __atomic_load_n(&growth_requests[rank][wire * WINDLASS_GROWTH_REQUESTS_PER_WIRE + peer], __ATOMIC_RELAXED);
  }
  static uint64_t& word(uint64_t address) { return *reinterpret_cast<uint64_t*>(address); }

  // One launch and its synchronisation, as one group of `rank` on its stream.
  void group(uint32_t rank, const std::vector<P2pCall>& calls, const P2pLimits& limits, uint64_t random) {
    WindlassP2pLaunch launch;
    std::vector<WindlassP2pOperation> operations(calls.size());
    WindlassP2pGeometry own = geometry;
    own.rank = rank;
    const P2pShape shape = windlass_arrange_p2p(calls.data(), calls.size(), peers[rank].data(), peers[rank].size(), &own, &limits, &launch, operations.data());
    host::Device* const device = gpus ? &gpus->devices[rank] : nullptr;
    if (shape.blocks == 0) {
      if (device) ++device->launched;  // its turn is over
      return;
    }
    expect(shape.blocks != windlass_refused, "too many channels");
    if (rank == options.strayed_rank) {
      expect(launch.used_blocks == (1u << options.bulk_channels) - 1, "all virtual blocks are in use");
      auto* const connections = reinterpret_cast<WindlassP2pConnection*>(launch.storage);
      for (uint32_t i = 0; i < launch.send_connections + launch.receive_connections; ++i)
        connections[i].first_block = (uint16_t)((connections[i].first_block + options.bulk_channels / 2) % options.bulk_channels);
    }
    launch.control = reinterpret_cast<uint64_t>(&control);
    launch.report = reinterpret_cast<uint64_t>(&reports[rank]);
    launch.growth_requests = reinterpret_cast<uint64_t>(growth_requests[rank].data());
    for (const P2pPeer& peer : peers[rank])
      if (peer.send.growth && __atomic_load_n(&word(peer.send.growth + 8 * WINDLASS_GROWTH_BULK), __ATOMIC_ACQUIRE))
        launch.flags |= WINDLASS_LAUNCH_BULK_GREW;
    if (shape.lists_operations) launch.operation_list = reinterpret_cast<uint64_t>(operations.data());
    // Only the used part of the launch is handed over; the rest holds anything.
    std::vector<uint64_t> parameter(WINDLASS_LAUNCH_BYTES / 8, 0xababababababababull);
    std::memcpy(parameter.data(), &launch, shape.parameter_bytes);
    const auto& given = *reinterpret_cast<const WindlassP2pLaunch*>(parameter.data());
    machine.launch(shape.blocks, shape.threads, shape.shared_bytes, random, [&given] { run_group(given); }, device, shape.cluster);
  }
  bool aborted() const { return __atomic_load_n(&control, __ATOMIC_ACQUIRE) != WINDLASS_CONTROL_RUN; }
  void abort() { __atomic_store_n(&control, (uint32_t)WINDLASS_CONTROL_ABORT, __ATOMIC_RELEASE); }
  void print_reports() const {
    for (uint32_t rank = 0; rank < options.ranks; ++rank)
      for (uint32_t i = 0; i < std::min<uint32_t>(reports[rank].claimed, 4); ++i) {
        const WindlassP2pReportEntry& entry = reports[rank].entries[i];
        std::fprintf(stderr, "rank %u waits for rank %u, channel %u, what %u, message %u, packet %llu, seen %llu\n", rank, entry.peer, entry.channel, entry.waited_for, entry.operation,
                     (unsigned long long)entry.sequence, (unsigned long long)entry.seen);
      }
  }

  // Checks at the end that every packet sent was received, and that both sides' counts agree.
  void check_words() {
    for (uint32_t from = 0; from < options.ranks; ++from)
      for (uint32_t to = 0; to < options.ranks; ++to) {
        if (from == to) continue;
        Directed& pair = pairs[from * options.ranks + to];
        for (uint32_t i = 0; i < options.ll128_channels; ++i) {
          const uint64_t own = i * WINDLASS_PROGRESS_STRIDE;
          const uint64_t sent = word(pair.ll128_progress[0].address + own);
          expect(sent == word(pair.ll128_progress[1].address + own), "LL128 progress differs");
          const uint64_t from = word(pair.ll128_from.address + i * WINDLASS_LL128_FROM_STRIDE);
          check_rings(pair.ll128_progress, own, from, pair.grown[0]);
          if (from) check_move(pair, i, from - 1, sent);
          expect(sent == word(pair.ll128_credit.address + i * WINDLASS_LL128_WORD_STRIDE), "LL128 credit is not full at the end");
        }
        for (uint32_t i = 0; i < options.bulk_channels; ++i) {
          const uint64_t own = i * WINDLASS_PROGRESS_STRIDE, posted = word(pair.posted.address + i * WINDLASS_BULK_WORD_STRIDE);
          const uint64_t sent = word(pair.bulk_progress[0].address + own);
          expect(sent == word(pair.bulk_progress[1].address + own), "bulk progress differs");
          check_rings(pair.bulk_progress, own, word(pair.posted.address + i * WINDLASS_BULK_WORD_STRIDE + 8), pair.grown[1]);
          expect(!(posted & WINDLASS_POSTED_MOVES) == !word(pair.bulk_progress[0].address + own + 8), "the posted word does not say that the channel has moved");
          expect(sent == word(pair.bulk_credit.address + i * WINDLASS_BULK_WORD_STRIDE), "bulk credit is not full at the end");
          expect(sent == (posted & ~WINDLASS_POSTED_MOVES), "posted word is behind");
        }
      }
  }

  // Checks that the sender's side of a moved channel has its ring, and the receiver's side too if it has come so far.
  void check_rings(const Region* progress, uint64_t own, uint64_t from, const Region& grown) {
    const uint64_t sent = word(progress[0].address + own), sender = word(progress[0].address + own + 8), receiver = word(progress[1].address + own + 8);
    expect(!sender == !from && (!from || from - 1 <= sent), "a channel has moved and not said so");
    expect(!sender || (sender & ~127ull) == grown.address, "a channel has moved elsewhere");
    // An LL128 receiver that has found all packets since does not know yet; then nothing has come through the new ring.
    expect(receiver == sender || (receiver == 0 && from - 1 == sent), "the receiver does not know where the channel has moved");
    channels_moved += sender != 0;
  }
  // Checks that the packet before the move is the last one in the first ring, and that all later ones lie in the other ring.
  void check_move(const Directed& pair, uint32_t channel, uint64_t from, uint64_t sent) {
    const auto tag = [&](uint64_t ring, uint64_t slots, uint64_t packet) {
      return word(ring + (channel * slots + (packet & (slots - 1))) * WINDLASS_PACKET_SLOT_BYTES + WINDLASS_LINE_BYTES - 8);
    };
    const uint64_t slots = 1ull << (pair.told[0] & 63);
    if (from > options.first_count)
      expect(tag(pair.ll128_ring.address, options.ll128_slots, from - 1) == geometry.first_tag + from - 1, "a channel has moved later than it said");
    for (uint64_t packet = std::max(from, sent > slots ? sent - slots : 0); packet < sent; ++packet)
      expect(tag(pair.grown[0].address, slots, packet) == geometry.first_tag + packet, "a channel has moved earlier than it said");
  }
  uint32_t channels_moved = 0;
};

// --- messages -----------------------------------------------------------------------------------------------------------

struct Message {
  uint32_t from, to;
  uint64_t bytes;
  uint32_t send_offset = 0, receive_offset = 0;  // of the buffers from 16-byte alignment
};
typedef std::vector<Message> Messages;

uint8_t expected_byte(uint64_t id, uint64_t index) {
  uint64_t z = (id << 40 ^ index / 8) * 0x9e3779b97f4a7c15ull;
  z = (z ^ z >> 29) * 0xbf58476d1ce4e5b9ull;
  return (uint8_t)(z >> (8 * (index % 8)));
}

constexpr uint8_t canary = 0x5e;
constexpr size_t margin = 160;

struct Buffer {
  std::vector<uint8_t> bytes;
  uint8_t* data;
  size_t size;
  Buffer(size_t n, uint32_t offset) : bytes(n + 2 * margin + 32, canary), size(n) {
    data = reinterpret_cast<uint8_t*>(((reinterpret_cast<uint64_t>(bytes.data()) + margin + 15) & ~15ull) + offset);
  }
  void check(uint64_t id, const char* what) const {
    for (const uint8_t& byte : bytes) {
      const bool inside = &byte >= data && &byte < data + size;
      const uint8_t right = inside ? expected_byte(id, (uint64_t)(&byte - data)) : canary;
      if (byte != right)
        fail(std::string(what) + " message " + std::to_string(id) + ": byte " + std::to_string(&byte - data) + " of " +
             std::to_string(size) + " is " + std::to_string(byte) + ", not " + std::to_string(right));
    }
  }
};

struct Step {
  Messages messages;
};

struct How {
  // Ranks cut each step's calls into groups of at most this many calls, each in its own way (1: one group of all).
  uint32_t sender_groups = 1;
  uint32_t late_microseconds = 0;   // a rank starts each step up to this late
  uint32_t late_rank = ~0u;         // this rank starts late each time
  std::function<void(uint32_t, size_t)> turn = {};  // waits until this rank may launch this step
};

P2pLimits limits_of(const Options& o) { return {o.bulk_copies, o.stages, 220u << 10}; }

// One rank's side of all steps.
void run_rank(World& world, uint32_t rank, const std::vector<Step>& steps, const How& how, uint64_t random_seed) {
  host::Random random{random_seed};
  uint64_t base = 0;
  size_t number = 0;
  for (const Step& step : steps) {
    std::vector<std::unique_ptr<Buffer>> buffers(step.messages.size() * 2);
    std::vector<P2pCall> calls;
    for (size_t i = 0; i < step.messages.size(); ++i) {
      const Message& message = step.messages[i];
      if (message.from == rank) {
        auto& buffer = buffers[2 * i];
        buffer.reset(new Buffer(message.bytes, message.send_offset));
        for (size_t k = 0; k < message.bytes; ++k) buffer->data[k] = expected_byte(base + i, k);
        calls.push_back({reinterpret_cast<uint64_t>(buffer->data), message.bytes, message.to, 0});
      }
      if (message.to == rank) {
        auto& buffer = buffers[2 * i + 1];
        buffer.reset(new Buffer(message.bytes, message.receive_offset));
        calls.push_back({reinterpret_cast<uint64_t>(buffer->data), message.bytes, message.from, 1});
      }
    }
    if (how.late_microseconds) usleep((useconds_t)random.below(how.late_microseconds));
    if (rank == how.late_rank) usleep(20000);
    if (how.turn) how.turn(rank, number++);
    const P2pLimits limits = limits_of(world.options);
    if (how.sender_groups == 1) {
      world.group(rank, calls, limits, random.next());
    } else {
      // No cut hangs: all ranks call in the order of messages, so the first unfinished one is in the current group of both its ranks.
      size_t at = 0;
      while (at < calls.size()) {
        const size_t take = std::min<size_t>(calls.size() - at, 1 + random.below(how.sender_groups));
        world.group(rank, std::vector<P2pCall>(calls.begin() + (long)at, calls.begin() + (long)(at + take)), limits, random.next());
        at += take;
      }
    }
    if (world.aborted()) return;
    for (size_t i = 0; i < step.messages.size(); ++i) {
      if (buffers[2 * i]) buffers[2 * i]->check(base + i, "sent");
      if (buffers[2 * i + 1]) buffers[2 * i + 1]->check(base + i, "received");
    }
    base += step.messages.size();
  }
}

uint64_t bytes_moved = 0;

// The steps of one communicator, and how its ranks take them.
struct Run {
  World& world;
  const std::vector<Step>& steps;
  const How& how;
};

// Runs all ranks of all communicators at once. False if they wait for ever.
bool all_end(const std::vector<Run>& runs, std::chrono::milliseconds patience = residency::patience) {
  host::Random random{seed ^ 0x77};
  residency::Threads threads;
  for (const Run& run : runs)
    for (uint32_t rank = 0; rank < run.world.options.ranks; ++rank) {
      const uint64_t own = random.next();
      threads.start([run, rank, own] { run_rank(run.world, rank, run.steps, run.how, own); });
    }
  const auto stop = [&] {
    for (const Run& run : runs) run.world.abort();
  };
  return threads.join(stop, patience);
}
void run_together(const std::vector<Run>& runs) {
  if (!all_end(runs)) {
    for (const Run& run : runs) run.world.print_reports();
    fail("the ranks wait for ever, " + (runs[0].world.gpus ? runs[0].world.gpus->name() : "all blocks resident"));
  }
  for (const Run& run : runs) {
    run.world.check_words();
    for (const Step& step : run.steps)
      for (const Message& message : step.messages) bytes_moved += message.bytes;
  }
}
void run_all(World& world, const std::vector<Step>& steps, const How& how = {}) { run_together({{world, steps, how}}); }

#if HOST_TSAN
constexpr int scale = 6;  // fewer and smaller: a sanitized run is ten times slower
#else
constexpr int scale = 1;
#endif

// --- scenarios ----------------------------------------------------------------------------------------------------------

std::vector<uint64_t> interesting_sizes(const Options& o) {
  std::vector<uint64_t> sizes = {0, 1, 2, 7, 8, 15, 16, 17, 119, 120, 121, 128, 959, 960, 961, 1024, 1919, 1920, 1921, 2048, 3840, 3841};
  const uint64_t ll128_ring = (uint64_t)o.ll128_channels * o.ll128_slots * 1920, stripe = (uint64_t)o.bulk_channels * o.chunk;
  for (uint64_t around : {(uint64_t)o.ll128_channels * 1920, ll128_ring, o.bulk_from, (uint64_t)o.chunk * 10, stripe * o.bulk_slots, stripe * (o.bulk_slots + 1)})
    for (int64_t by : {-1920, -17, -16, -1, 0, 1, 15, 16, 1921}) sizes.push_back((uint64_t)((int64_t)around + by));
  return sizes;
}

// Groups of any geometry and limits: the kernel lays out in shared memory just what the launch asks for.
void shared_memory() {
  host::Random random{seed};
  const auto one_of = [&](const std::vector<uint32_t>& values) { return values[random.below(values.size())]; };
  uint32_t with_stages = 0, with_jobs = 0;
  for (int i = 0; i < 1000; ++i) {
    const uint32_t channels = one_of({1, 5, 24, 32}), chunk = one_of({4096, 16384, 32768});
    const WindlassP2pGeometry geometry = {1, 1ull << random.below(26), channels * one_of({1, 3, 8}), 8, channels, 2, chunk, 0};
    const P2pLimits limits = {one_of({0, 1}), 2 * one_of({1, 2, 3, 4}), one_of({48u << 10, 220u << 10})};
    const std::vector<P2pPeer> peers(8);
    std::vector<P2pCall> calls(random.below(40));
    for (P2pCall& call : calls) call = {16 * random.below(1000), random.below(1ull << random.below(27)), (uint32_t)random.below(8), one_of({0, 1})};
    std::vector<WindlassP2pOperation> operations(calls.size());
    WindlassP2pLaunch launch;
    const P2pShape shape = windlass_arrange_p2p(calls.data(), calls.size(), peers.data(), peers.size(), &geometry, &limits, &launch, operations.data());
    if (shape.blocks == windlass_refused) continue;
    const uint32_t total = windlass_shared_layout(launch).total;
    expect(shape.shared_bytes == total, "a launch asks for " + std::to_string(shape.shared_bytes) + " bytes of shared memory, and needs " + std::to_string(total));
    with_stages += launch.stages > 0;
    with_jobs += launch.jobs_per_warp > 0;
  }
  expect(with_stages > 100 && with_jobs > with_stages, "too few launches have chunks");
}

void sizes_and_alignments(bool bulk_copies) {
  Options o;
  o.bulk_copies = bulk_copies;
  World world(o);
  host::Random random{seed};
  std::vector<Step> steps;
  int i = 0;
  for (uint64_t size : interesting_sizes(o)) {
    if (++i % scale) continue;
    const uint32_t offset = random.below(2) ? 0 : (uint32_t)random.below(16);
    steps.push_back({{{0, 1, size, random.below(2) ? 0 : offset, random.below(2) ? 0 : (uint32_t)random.below(16)}}});
  }
  run_all(world, steps, {1, 300});
}

void every_alignment() {
  World world(Options{});
  std::vector<Step> steps;
  for (uint32_t offset = 0; offset < 16; ++offset) {
    Step step;
    for (uint64_t size : {5, 33, 977, 1935, 4001}) {
      step.messages.push_back({0, 1, size, offset, (offset * 7 + 3) % 16});
      step.messages.push_back({1, 0, size + offset, 0, offset});
    }
    if (offset % scale == 0) step.messages.push_back({0, 1, 41003, offset, 15 - offset});
    steps.push_back(step);
  }
  run_all(world, steps);
}

// Messages of a rank to itself, alone and beside others: any size and alignment, several in one group.
void to_itself() {
  World world(Options{});
  host::Random random{seed};
  std::vector<Step> steps;
  const auto offset = [&] { return random.below(2) ? 0 : (uint32_t)random.below(16); };
  for (uint64_t size : {0, 1, 7, 15, 16, 17, 31, 33, 1000, 65536, 65537, 200003}) {
    Step alone, beside;
    for (int i = 0; i < 3; ++i) {
      const uint32_t at = offset();
      alone.messages.push_back({0, 0, size + (uint64_t)i, at, random.below(2) ? at : offset()});
    }
    beside.messages = {{0, 1, size, 0, 0}, {0, 0, size, offset(), offset()}, {1, 0, 40000, 0, 0}, {1, 1, 5, 0, 0}, {0, 0, 3, 1, 2}};
    steps.push_back(alone);
    steps.push_back(beside);
  }
  run_all(world, steps, {1, 100});
}

// One rank sends, the other receives, many times: only credits go back.
void one_way() {
  World world(Options{});
  host::Random random{seed};
  std::vector<Step> steps;
  for (int i = 0; i < (HOST_TSAN ? 16 : 600); ++i) steps.push_back({{{0, 1, random.below(i % 8 ? 12000 : 120000)}}});
  run_all(world, steps, {1, 400});
}

void both_ways() {
  World world(Options{});
  host::Random random{seed};
  std::vector<Step> steps;
  for (int i = 0; i < (HOST_TSAN ? 8 : 300); ++i) {
    const uint64_t limit = i % 6 ? 12000 : 150000;
    steps.push_back({{{0, 1, random.below(limit)}, {1, 0, random.below(limit)}}});
  }
  run_all(world, steps, {1, 200});
}

// Messages of many times the ring's size, in both kinds of channels.
void far_larger_than_the_ring() {
  Options o;
  o.bulk_from = 700000;
  World world(o);
  const uint64_t ll128_ring = 4 * 4 * 1920, bulk_ring = 2 * 4 * 4096;
  std::vector<Step> steps;
  steps.push_back({{{0, 1, 20 * ll128_ring + 5}, {1, 0, 7 * ll128_ring + 5}}});
  steps.push_back({{{0, 1, 700000 + 3}, {1, 0, 20 * bulk_ring + 44700}}});
  o.bulk_from = 700000;
  run_all(world, steps);
}

// Rings of one or two slots: every packet waits for credit.
void smallest_rings() {
  for (uint32_t slots : {1u, 2u})
    for (bool copies : {true, false}) {
      Options o;
      o.ll128_slots = slots;
      o.bulk_slots = slots;
      o.bulk_copies = copies;
      o.stages = 2;
      World world(o);
      run_all(world, {{{{0, 1, 30000}, {1, 0, 31001}}}, {{{0, 1, 60000}, {1, 0, 90000, 0, 3}}}, {{{1, 0, 39999}}}, {{{0, 1, 100000}}}});
    }
}

Step pattern(const std::string& name, uint32_t ranks, const std::function<uint64_t()>& size) {
  Step step;
  if (name == "ring")
    for (uint32_t r = 0; r < ranks; ++r) step.messages.push_back({r, (r + 1) % ranks, size()});
  if (name == "all_to_all")
    for (uint32_t r = 0; r < ranks; ++r)
      for (uint32_t p = 0; p < ranks; ++p) step.messages.push_back({r, (r + p) % ranks, size()});
  if (name == "gather")
    for (uint32_t r = 1; r < ranks; ++r) step.messages.push_back({r, 0, size()});
  if (name == "scatter")
    for (uint32_t r = 1; r < ranks; ++r) step.messages.push_back({0, r, size()});
  return step;
}

void patterns(bool bulk_copies) {
  Options o;
  o.ranks = 4;
  o.bulk_copies = bulk_copies;
  World world(o);
  host::Random random{seed};
  std::vector<Step> steps;
  for (int round = 0; round < (HOST_TSAN ? 1 : 8); ++round)
    for (const char* name : {"ring", "all_to_all", "gather", "scatter"})
      for (uint64_t limit : {3000, 30000, 90000})
        steps.push_back(pattern(name, o.ranks, [&] { return random.below(limit / (HOST_TSAN ? 2 : 1)); }));
  // A hypercube: in each dimension, both ways with the neighbour.
  for (uint32_t dimension = 1; dimension < o.ranks; dimension *= 2) {
    Step step;
    for (uint32_t r = 0; r < o.ranks; ++r) step.messages.push_back({r, r ^ dimension, 20000 + random.below(40000)});
    steps.push_back(step);
  }
  run_all(world, steps, {1, 300});
}

void five_ranks() {
  Options o;
  o.ranks = 5;
  o.ll128_channels = 3;  // numbers of channels need not be powers of two
  o.bulk_channels = 3;
  World world(o);
  host::Random random{seed};
  std::vector<Step> steps;
  for (int i = 0; i < (HOST_TSAN ? 1 : 30); ++i) steps.push_back(pattern("all_to_all", 5, [&] { return random.below(i % 4 == 3 ? 60000 : 9000); }));
  run_all(world, steps, {1, 300});
}

// Several messages to one peer in one group, of both kinds, in order on every channel.
void several_to_one_peer() {
  World world(Options{});
  host::Random random{seed};
  std::vector<Step> steps;
  for (int i = 0; i < (HOST_TSAN ? 4 : 60); ++i) {
    Step step;
    for (int k = 0; k < 12; ++k) {
      const uint64_t size = random.below(4) ? random.below(9000) : 40000 + random.below(30000);
      step.messages.push_back({(uint32_t)random.below(2), 0, size, (uint32_t)random.below(3) * 8 % 16, (uint32_t)random.below(2) * 4});
      step.messages.back().to = 1 - step.messages.back().from;
    }
    steps.push_back(step);
  }
  run_all(world, steps, {1, 300});
}

// More operations than the parameters hold, zero sizes among them.
void three_hundred_operations() {
  Options o;
  o.ranks = 3;
  World world(o);
  host::Random random{seed};
  Step step;
  for (int i = 0; i < 450; ++i) {
    const uint32_t from = (uint32_t)random.below(3), to = (from + 1 + (uint32_t)random.below(2)) % 3;
    const uint64_t size = random.below(5) == 0 ? 0 : random.below(40) == 0 ? 40000 + random.below(9000) : random.below(2500);
    step.messages.push_back({from, to, size, (uint32_t)random.below(16), (uint32_t)random.below(16)});
  }
  run_all(world, {step, step});
}

// The sender's calls end before the receiver begins, as the rings hold all. Both sides cut their calls into groups differently.
void sender_far_ahead() {
  Options ll128;
  ll128.ll128_channels = 8 * ll128.bulk_channels;
  ll128.ll128_slots = 8;
  World world(ll128);
  Messages messages;
  // Exactly what the rings hold: 8 slots of each of 8 channels that one block serves, then of those that the other block serves.
  // Eight messages of any size fit, as they do over NCCL.
  for (int i = 0; i < 4; ++i) messages.push_back({0, 1, 1920 * 8});
  for (int i = 0; i < 4; ++i) messages.push_back({0, 1, 1920 * 16});
  std::vector<std::unique_ptr<Buffer>> out, in;
  for (size_t i = 0; i < messages.size(); ++i) {
    out.emplace_back(new Buffer(messages[i].bytes, 0));
    in.emplace_back(new Buffer(messages[i].bytes, 0));
    for (size_t k = 0; k < messages[i].bytes; ++k) out[i]->data[k] = expected_byte(i, k);
  }
  for (size_t i = 0; i < messages.size(); ++i)  // one group each; returns although nobody receives
    world.group(0, {{reinterpret_cast<uint64_t>(out[i]->data), messages[i].bytes, 1, 0}}, {1, 4, 220u << 10}, seed + i);
  std::vector<P2pCall> calls;
  for (size_t i = 0; i < messages.size(); ++i) calls.push_back({reinterpret_cast<uint64_t>(in[i]->data), messages[i].bytes, 0, 1});
  world.group(1, calls, {1, 4, 220u << 10}, seed);
  for (size_t i = 0; i < messages.size(); ++i) in[i]->check(i, "received");
  world.check_words();

  // 8 chunks in 2 channels of 4 slots.
  Options bulk;
  bulk.bulk_from = 20000;
  World large(bulk);
  Buffer source(2 * 4 * 4096, 0), sink(2 * 4 * 4096, 0);
  for (size_t k = 0; k < source.size; ++k) source.data[k] = expected_byte(9, k);
  large.group(0, {{reinterpret_cast<uint64_t>(source.data), source.size, 1, 0}}, {1, 4, 220u << 10}, seed);
  large.group(1, {{reinterpret_cast<uint64_t>(sink.data), sink.size, 0, 1}}, {1, 4, 220u << 10}, seed);
  sink.check(9, "received");
  large.check_words();
}

// One side makes a group of many calls, the other many groups: matching follows order, not groups.
void groups_cut_differently() {
  World world(Options{});
  host::Random random{seed};
  std::vector<Step> steps;
  for (int i = 0; i < (HOST_TSAN ? 4 : 60); ++i) {
    Step step;
    for (int k = 0; k < 9; ++k) step.messages.push_back({0, 1, random.below(k == 5 ? 80000 : 6000)});
    steps.push_back(step);
  }
  run_all(world, steps, {4, 300});
}

void tags_near(uint64_t first_tag, uint64_t first_count) {
  Options o;
  o.first_tag = first_tag;
  o.first_count = first_count;
  World world(o);
  host::Random random{seed};
  std::vector<Step> steps;
  for (int i = 0; i < (HOST_TSAN ? 4 : 100); ++i) steps.push_back({{{0, 1, 3000 + random.below(60000)}, {1, 0, random.below(30000)}}});
  run_all(world, steps, {1, 200});
}

// Rank 2 sends to rank 1 only after it has received everything from rank 0; rank 1 receives from both at once. A warp of rank 0 or 1 that
// stayed with one channel until it moves would wait for ever: the ring from 0 to 1 is full, and rank 2 sends only after rank 0's rest.
void none_holds_up_another() {
  for (int bulk = 0; bulk < 3; ++bulk) {
    Options o;
    o.ranks = 3;
    o.ll128_channels = 20;
    o.ll128_slots = 2;
    o.bulk_from = bulk ? 1000 : 1 << 20;
    o.bulk_copies = bulk == 1;
    World world(o);
    const P2pLimits limits = limits_of(o);
    const size_t bytes = 300000;
    std::vector<std::unique_ptr<Buffer>> buffers;
    const auto make = [&](int id) {
      buffers.emplace_back(new Buffer(bytes, 0));
      for (size_t k = 0; id >= 0 && k < bytes; ++k) buffers.back()->data[k] = expected_byte((uint64_t)id, k);
      return reinterpret_cast<uint64_t>(buffers.back()->data);
    };
    const uint64_t send01 = make(1), send02 = make(2), send21 = make(3), receive01 = make(-1), receive02 = make(-1), receive21 = make(-1);
    std::thread zero([&] { world.group(0, {{send01, bytes, 1, 0}, {send02, bytes, 2, 0}}, limits, seed); });
    std::thread one([&] { world.group(1, {{receive01, bytes, 0, 1}, {receive21, bytes, 2, 1}}, limits, seed + 1); });
    world.group(2, {{receive02, bytes, 0, 1}}, limits, seed + 2);
    world.group(2, {{send21, bytes, 1, 0}}, limits, seed + 3);
    zero.join();
    one.join();
    buffers[3]->check(1, "received");
    buffers[4]->check(2, "received");
    buffers[5]->check(3, "received");
    world.check_words();
  }
}

// Payload that equals future tags must not be taken for a tag.
void payload_like_tags() {
  World world(Options{});
  std::vector<uint64_t> out(24000 / 8), in(24000 / 8);
  for (int round = 0; round < 8; ++round) {
    for (size_t i = 0; i < out.size(); ++i) out[i] = 1 + i % 24 + round;
    std::thread sender([&] { world.group(0, {{reinterpret_cast<uint64_t>(out.data()), 24000, 1, 0}}, {1, 4, 220u << 10}, seed); });
    world.group(1, {{reinterpret_cast<uint64_t>(in.data()), 24000, 0, 1}}, {1, 4, 220u << 10}, seed + 1);
    sender.join();
    expect(in == out, "payload that looks like tags");
  }
}

// A peer never comes: the kernels leave at the abort word and report what they waited for.
void abort_in_the_middle(bool bulk_copies) {
  for (int what = 0; what < 4; ++what) {
    Options o;
    o.ranks = 3;
    o.bulk_copies = bulk_copies;
    World world(o);
    Buffer buffer(200000, 0), other(200000, 0);
    const auto address = [](Buffer& b) { return reinterpret_cast<uint64_t>(b.data); };
    // 0: a sender without room for LL128, 1: for chunks, 2: a receiver of LL128, 3: of chunks; each beside a finished exchange.
    const uint64_t bytes = what % 2 ? 180000 : 39000;
    std::vector<P2pCall> calls = {{address(buffer), bytes, 1, what >= 2}, {address(other), 5000, 2, 0}};
    std::thread stuck([&] { world.group(0, calls, {bulk_copies, 4, 220u << 10}, seed); });
    Buffer sink(5000, 0);
    world.group(2, {{address(sink), 5000, 0, 1}}, {bulk_copies, 4, 220u << 10}, seed);
    usleep(30000);
    __atomic_store_n(&world.control, (uint32_t)WINDLASS_CONTROL_ABORT, __ATOMIC_RELEASE);
    const auto before = std::chrono::steady_clock::now();
    stuck.join();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count();
    expect(seconds < 20, "the kernel took long to leave");
    const WindlassP2pReport& report = world.reports[0];
    expect(report.claimed >= 1, "no report");
    expect(report.rank == 0, "the report names another rank");
    bool found = false;
    for (uint32_t i = 0; i < std::min<uint32_t>(report.claimed, WINDLASS_REPORT_ENTRIES); ++i) {
      const WindlassP2pReportEntry& entry = report.entries[i];
      expect(entry.peer == 1, "the report names a peer that is not stuck");
      const uint32_t right[] = {WINDLASS_WAITED_P2P_LL128_CREDIT, WINDLASS_WAITED_BULK_CREDIT, WINDLASS_WAITED_P2P_LL128_DATA, WINDLASS_WAITED_BULK_DATA};
      expect(entry.waited_for == right[what], "the report names another wait: " + std::to_string(entry.waited_for));
      // Four slots a channel: the sender waits with packet or chunk 4, the receiver with the first.
      expect(entry.sequence == (what < 2 ? 4u : 0u), "the report names sequence " + std::to_string(entry.sequence));
      expect(entry.operation == 0, "the report names another operation");
      found = true;
    }
    expect(found, "nothing stuck was reported");
  }
}

// --- growing ------------------------------------------------------------------------------------------------------------

constexpr uint32_t both_wires[] = {WINDLASS_GROWTH_LL128, WINDLASS_GROWTH_BULK};

// A message of so many bytes, with its buffers at both ranks.
struct Parcel {
  Buffer out, in;
  uint64_t id;
  Parcel(uint64_t i, size_t bytes) : out(bytes, 0), in(bytes, 0), id(i) {
    for (size_t k = 0; k < bytes; ++k) out.data[k] = expected_byte(id, k);
  }
  P2pCall send(uint32_t to) const { return {reinterpret_cast<uint64_t>(out.data), out.size, to, 0}; }
  P2pCall receive(uint32_t from) const { return {reinterpret_cast<uint64_t>(in.data), in.size, from, 1}; }
};

// A way to send: LL128, bulk copies, or chunks by ordinary stores.
struct Wire {
  uint32_t wire;
  bool bulk_copies;
  Options options() const {
    Options o;
    o.bulk_copies = bulk_copies;
    o.bulk_from = wire == WINDLASS_GROWTH_BULK ? 1 : 1 << 30;
    return o;
  }
  // Bytes that fill so many slots of every channel.
  size_t bytes(const Options& o, size_t slots) const {
    return slots * (wire == WINDLASS_GROWTH_BULK ? o.bulk_channels * o.chunk : o.ll128_channels * 1920);
  }
};
constexpr Wire wires[] = {{WINDLASS_GROWTH_LL128, true}, {WINDLASS_GROWTH_BULK, true}, {WINDLASS_GROWTH_BULK, false}};

// A sender without room and without a receiver asks for a larger ring, moves into it when there is one, and ends. A receiver that
// begins later finds what lies in both rings; then traffic goes on around the larger ring.
void grow_while_stalled() {
  for (const Wire& wire : wires)
    for (uint32_t times : {2, 8}) {
      if (HOST_TSAN && times > 2) continue;
      const Options o = wire.options();
      World world(o);
      const uint32_t slots = times * world.first_slots(wire.wire);
      const Parcel first(1, wire.bytes(o, slots) - 1000), second(2, wire.bytes(o, slots)), third(3, wire.bytes(o, 3 * slots));
      std::atomic<bool> sent{false};
      std::thread sender([&] {
        world.group(0, {first.send(1)}, limits_of(o), seed);
        sent = true;
      });
      while (!world.has_request(0, 1, wire.wire)) usleep(1000);
      expect(!sent, "the first ring held more than it has room for");
      expect(!world.has_request(0, 1, 1 - wire.wire), "the sender asked for the other wire");
      world.grow(0, 1, wire.wire, slots, 1000);
      sender.join();
      world.group(1, {first.receive(0)}, limits_of(o), seed + 1);
      first.in.check(1, "received");
      world.check_words();
      expect(world.channels_moved == (wire.wire ? o.bulk_channels : o.ll128_channels), "not every channel has moved");
      // As much as the larger ring holds, again without a receiver; and more than it holds.
      world.group(0, {second.send(1)}, limits_of(o), seed + 2);
      world.group(1, {second.receive(0)}, limits_of(o), seed + 3);
      second.in.check(2, "received");
      std::thread late([&] { world.group(1, {third.receive(0)}, limits_of(o), seed + 4); });
      world.group(0, {third.send(1)}, limits_of(o), seed + 5);
      late.join();
      third.in.check(3, "received");
      world.check_words();
    }
}

// The sender moves in the middle of a group that the receiver takes as several: a launch of the receiver may learn of a move that lies
// ahead of its end.
void grow_and_cut() {
  for (const Wire& wire : wires) {
    const Options o = wire.options();
    World world(o);
    const Parcel first(1, wire.bytes(o, 3)), second(2, wire.bytes(o, 3)), third(3, wire.bytes(o, 9));
    std::thread sender([&] { world.group(0, {first.send(1), second.send(1), third.send(1)}, limits_of(o), seed); });
    while (!world.has_request(0, 1, wire.wire)) usleep(1000);
    world.grow(0, 1, wire.wire, 16);
    sender.join();
    for (const Parcel* parcel : {&first, &second, &third}) {
      world.group(1, {parcel->receive(0)}, limits_of(o), seed + parcel->id);
      parcel->in.check(parcel->id, "received");
    }
    world.check_words();
  }
}

// The ring has grown before anything is sent: LL128 channels move when they first lack room, bulk channels at once.
void grow_before_use() {
  for (const Wire& wire : wires) {
    const Options o = wire.options();
    World world(o);
    world.grow(0, 1, wire.wire, 4 * world.first_slots(wire.wire));
    const Parcel parcel(1, wire.bytes(o, 4 * world.first_slots(wire.wire)));
    world.group(0, {parcel.send(1)}, limits_of(o), seed);
    world.group(1, {parcel.receive(0)}, limits_of(o), seed + 1);
    parcel.in.check(1, "received");
    world.check_words();
    expect(world.channels_moved == (wire.wire ? o.bulk_channels : o.ll128_channels), "not every channel has moved");
    std::vector<Step> steps;
    for (int i = 0; i < 12 / scale; ++i) steps.push_back({{{0, 1, wire.bytes(o, 3) * (uint64_t)(1 + i)}, {1, 0, 5000}}});
    run_all(world, steps, {1, 200});
  }
}

// Only the receiver's host has told its kernels: no channel moves. The sender's host tells its own later.
void grow_one_side_first() {
  for (const Wire& wire : wires) {
    const Options o = wire.options();
    World world(o);
    world.make_growth(0, 1, wire.wire, 16);
    world.tell_growth(0, 1, wire.wire, 1);
    run_all(world, {{{{0, 1, wire.bytes(o, 11) + 7}}}, {{{0, 1, 99}}}});
    expect(world.channels_moved == 0, "a channel has moved without its sender");
    world.tell_growth(0, 1, wire.wire, 0);
    run_all(world, {{{{0, 1, wire.bytes(o, 30) + 7}}}, {{{0, 1, wire.bytes(o, 16)}}}, {{{0, 1, 99}}}});
  }
}

// Both ranks send more than the first ring takes, then receive; the hosts grow what is asked for while both kernels spin.
void head_to_head() {
  for (const Wire& wire : wires) {
    const Options o = wire.options();
    World world(o);
    const size_t bytes = wire.bytes(o, 7 * world.first_slots(wire.wire)) + 333;
    const Parcel parcels[] = {{1, bytes}, {2, bytes}};
    const auto rank = [&](uint32_t r) {
      world.group(r, {parcels[r].send(1 - r)}, limits_of(o), seed + r);
      world.group(r, {parcels[1 - r].receive(1 - r)}, limits_of(o), seed + 2 + r);
    };
    std::thread zero(rank, 0), one(rank, 1);
    // Waits for both requests first: a rank that may go on receives, and then the other need not ask any more.
    for (uint32_t r = 0; r < 2; ++r)
      while (!world.has_request(r, 1 - r, wire.wire)) usleep(500);
    for (uint32_t r = 0; r < 2; ++r) world.grow(r, 1 - r, wire.wire, 8 * world.first_slots(wire.wire), 500);
    zero.join();
    one.join();
    parcels[0].in.check(1, "received");
    parcels[1].in.check(2, "received");
    world.check_words();
  }
}

// Several messages are sent before the first is received, over both wires, each in its own group.
void eight_deep() {
  Options o;
  World world(o);
  std::vector<std::unique_ptr<Parcel>> parcels;
  for (uint64_t i = 0; i < 8; ++i) parcels.emplace_back(new Parcel(i, i % 2 ? 39999 : 40000 + 4096 * i));
  std::thread sender([&] {
    for (const auto& parcel : parcels) world.group(0, {parcel->send(1)}, limits_of(o), seed + parcel->id);
  });
  for (bool grown[2] = {}; !grown[0] || !grown[1]; usleep(500))
    for (uint32_t wire : both_wires)
      if (!grown[wire] && world.has_request(0, 1, wire)) {
        world.grow(0, 1, wire, 64);
        grown[wire] = true;
      }
  sender.join();
  for (const auto& parcel : parcels) world.group(1, {parcel->receive(0)}, limits_of(o), seed + 20 + parcel->id);
  for (const auto& parcel : parcels) parcel->in.check(parcel->id, "received");
  world.check_words();
}

// The hosts of a communicator: they grow most rings at some time, in some order, while groups run.
struct Hosts {
  std::thread thread;
  Hosts(World& world, uint64_t random_seed, uint32_t within_microseconds) {
    thread = std::thread([&world, random_seed, within_microseconds] {
      host::Random random{random_seed};
      std::vector<uint32_t> order;
      const uint32_t ranks = world.options.ranks;
      for (uint32_t i = 0; i < ranks * ranks * 2; ++i)
        if (i / 2 / ranks != i / 2 % ranks) order.push_back(i);
      for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
      for (uint32_t which : order) {
        if (random.below(6) == 0) continue;
        usleep((useconds_t)random.below(within_microseconds / order.size() + 1));
        const uint32_t wire = which & 1, slots = world.first_slots(wire) << (1 + random.below(4));
        world.grow(which / 2 / ranks, which / 2 % ranks, wire, slots, (uint32_t)random.below(300));
      }
    });
  }
  ~Hosts() { thread.join(); }
};

// Rings grow in the middle of traffic, both ways, on both wires.
void grow_in_traffic(bool bulk_copies) {
  host::Random random{seed};
  uint32_t moved = 0;
  // A channel that always finds room does not move: then another round follows, with the smallest rings. On a slow machine rings may
  // also come when no sender is stalled.
  for (int round = 0, rounds = HOST_TSAN ? 1 : 10; round < rounds || (moved == 0 && round < rounds + 4); ++round) {
    Options o;
    o.bulk_copies = bulk_copies;
    o.ll128_slots = o.bulk_slots = round < rounds ? 1u << random.below(3) : 1;
    o.bulk_channels = 1 + (uint32_t)random.below(3);
    o.ll128_channels = o.bulk_channels * (1 + (uint32_t)random.below(2));
    World world(o);
    std::vector<Step> steps;
    for (int i = 0; i < (HOST_TSAN ? 6 : 24); ++i) {
      Step step;
      for (uint64_t k = random.below(4); k < 4; ++k) {
        const uint32_t from = (uint32_t)random.below(2);
        step.messages.push_back({from, 1 - from, random.below(random.below(2) ? 30000 : 150000), (uint32_t)random.below(2) * 5, 0});
      }
      steps.push_back(step);
    }
    {
      Hosts hosts(world, random.next(), HOST_TSAN ? 400000 : 30000);
      run_all(world, steps, {1 + (uint32_t)random.below(2) * 3, 300});
    }
    run_all(world, {steps[0], steps[1]});
    for (int more = 0; more < 4 && moved + world.channels_moved == 0; ++more) run_all(world, steps);
    moved += world.channels_moved;
  }
  expect(moved > 0, "no channel has moved");
  std::printf("%u channels moved\n", moved);
}

// Random groups over 2 to 4 ranks, grids, sizes, alignments and geometries, one after the other.
void random_groups() {
  host::Random random{seed};
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(4);
  int worlds = 0;
  do {
    Options o;
    o.ranks = 2 + (uint32_t)random.below(HOST_TSAN ? 2 : 3);
    o.ll128_slots = 1u << random.below(4);
    o.bulk_channels = 1 + (uint32_t)random.below(4);
    o.ll128_channels = o.bulk_channels * (1 + (uint32_t)random.below(4));
    o.bulk_slots = 1u << random.below(4);
    o.chunk = 128u << random.below(7);
    o.bulk_from = 1 + random.below(20000);
    o.stages = 2 * (1 + (uint32_t)random.below(4));
    o.bulk_copies = random.below(3) != 0;
    World world(o);
    std::vector<Step> steps;
    for (int i = 0; i < 12 / scale; ++i) {
      Step step;
      const int count = 1 + (int)random.below(8);
      for (int k = 0; k < count; ++k) {
        const uint32_t from = (uint32_t)random.below(o.ranks), to = (from + (uint32_t)random.below(o.ranks)) % o.ranks;
        const bool odd = random.below(2);
        step.messages.push_back({from, to, random.below(random.below(3) ? 3000 : 30000), odd ? (uint32_t)random.below(16) : 0, odd ? (uint32_t)random.below(16) : 0});
      }
      steps.push_back(step);
    }
    {
      std::unique_ptr<Hosts> hosts;
      if (random.below(2)) hosts.reset(new Hosts(world, random.next(), 40000));
      run_all(world, steps, {1, 200});
    }
    ++worlds;
  } while (std::chrono::steady_clock::now() < end);
  std::printf("%d communicators\n", worlds);
}

// --- few resident blocks ------------------------------------------------------------------------------------------------

// A geometry of several blocks with small rings. Under ThreadSanitizer a program may have some 250 warps.
uint32_t any_blocks(host::Random& random) { return (uint32_t[]){2, 3, 4, 6, 8, 8, 12}[random.below(HOST_TSAN ? 2 : 7)]; }
Options of_few_blocks(host::Random& random, uint32_t ranks, uint32_t blocks) {
  Options o;
  o.ranks = ranks;
  o.bulk_channels = blocks;
  o.ll128_channels = blocks * (1 + (uint32_t)random.below(3));
  o.ll128_slots = 1u << random.below(3);
  o.bulk_slots = 1u << random.below(3);
  // A message has two or three chunks of a channel.
  o.chunk = (o.ll128_channels * 1920 / o.bulk_channels / 2 + 127) / 128 * 128;
  o.bulk_from = random.below(3) == 0 ? 1 << 30 : random.below(o.ll128_channels * 1920);
  o.bulk_copies = random.below(3) != 0;
  o.stages = 2;
  return o;
}
uint32_t cluster_of(const Options& o) { return o.bulk_channels < 4 ? 1 : 4; }
uint32_t grid_of(const Options& o) { return o.bulk_channels; }
uint64_t any_size(host::Random& random, const Options& o) {
  const uint64_t on_all_channels = o.ll128_channels * 1920;
  return random.below(2) ? random.below(4000) : on_all_channels / 2 + random.below(on_all_channels);
}
// A random step in which every rank takes part: else a rank would have no place in the order of launches.
Step any_step(host::Random& random, const Options& o) {
  const auto size = [&] { return any_size(random, o); };
  switch (random.below(6)) {
    case 0: return pattern("ring", o.ranks, size);
    case 1: return pattern("gather", o.ranks, size);
    case 2: return pattern("scatter", o.ranks, size);
    case 3:
    case 4: return pattern("all_to_all", o.ranks, size);
  }
  Step step;
  for (uint64_t i = 1 + random.below(3 * o.ranks); i; --i) {
    const uint32_t from = (uint32_t)random.below(o.ranks), to = (from + 1 + (uint32_t)random.below(o.ranks - 1)) % o.ranks;
    for (uint64_t several = 1 + random.below(3); several; --several) step.messages.push_back({from, to, size()});
  }
  return step;
}
std::vector<Step> any_steps(host::Random& random, const Options& o, size_t count) {
  std::vector<Step> steps;
  while (steps.size() < count) steps.push_back(any_step(random, o));
  return steps;
}

// Each rank's GPU has room for another part of the grid, at least for one cluster.
void few_blocks_resident() {
  host::Random random{seed};
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(4);
  int worlds = 0;
  do {
    const Options o = of_few_blocks(random, HOST_TSAN ? 2 + worlds % 2 : (uint32_t[]){2, 3, 4, 8}[worlds % 4], any_blocks(random));
    residency::Gpus gpus(grid_of(o), cluster_of(o), residency::any_slots(random, o.ranks, cluster_of(o), std::min(grid_of(o), 32 / o.ranks + 4)));
    World world(o);
    world.gpus = &gpus;
    run_all(world, any_steps(random, o, HOST_TSAN ? 1 : 4), {1, 200});
    ++worlds;
  } while (std::chrono::steady_clock::now() < end);
  std::printf("%d communicators\n", worlds);
}

// Checks the tests of few blocks: if the two sides serve a channel by different blocks, half of the blocks are not enough.
void unlike_blocks_hang() {
  Options o;
  o.bulk_channels = 8;
  o.ll128_channels = 16;
  o.bulk_from = 1 << 20;
  o.strayed_rank = 1;
  const std::vector<Step> steps = {pattern("all_to_all", 2, [&] { return o.bulk_channels * WINDLASS_PACKETS_A_BLOCK * 1920; })};
  World whole(o);  // all blocks resident
  run_all(whole, steps);
  residency::Gpus gpus(grid_of(o), 4, {4, 4});
  World world(o);
  world.gpus = &gpus;
  expect(!all_end({{world, steps, How{}}}, std::chrono::seconds(HOST_TSAN ? 5 : 1)), "channels in unlike blocks, of which half are resident, went through");
  expect(world.reports[0].claimed && world.reports[1].claimed, "nobody says what he waited for");
}

// Several communicators on the same GPUs, whose kernels come in another order on some ranks: resident kernels wait for a peer's
// kernel that has no room yet.
void communicators_share_gpus() {
  host::Random random{seed};
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(4);
  int worlds_made = 0;
  do {
    const uint32_t ranks = HOST_TSAN ? 2 : (uint32_t[]){2, 3, 4}[random.below(3)], blocks = std::min(any_blocks(random), 24 / ranks);
    std::vector<Options> options;
    for (int i = 0; i < (HOST_TSAN ? 3 : 4); ++i) options.push_back(of_few_blocks(random, ranks, blocks));
    const uint32_t grid = grid_of(options[0]), cluster = cluster_of(options[0]);
    // Half of the time there is room for one grid and a cluster only: then the ranks have only parts of one kernel resident in common.
    const bool tight = random.below(2);
    residency::Gpus gpus(grid, cluster, residency::any_slots(random, ranks, grid + cluster, tight ? grid + cluster : 2 * grid + cluster));
    residency::Turns turns(gpus, (uint32_t)options.size(), random);
    std::deque<World> worlds;
    std::deque<How> hows;
    std::deque<std::vector<Step>> steps;
    std::vector<Run> runs;
    for (uint32_t i = 0; i < turns.communicators(); ++i) {
      World& world = worlds.emplace_back(options[i]);
      world.gpus = &gpus;
      How& how = hows.emplace_back();
      how.late_microseconds = 200;
      how.turn = [&world, &turns, i](uint32_t rank, size_t step) { turns.wait(rank, i, step, [&world] { return world.aborted(); }); };
      steps.push_back(any_steps(random, options[i], HOST_TSAN ? 1 : 2));
      if (tight)
        for (Step& step : steps.back()) step = pattern("all_to_all", ranks, [&] { return (1 + random.below(2)) * options[i].ll128_channels * 960; });
      // Messages of a rank to itself would need blocks beyond the grid.
      for (Step& step : steps.back())
        step.messages.erase(std::remove_if(step.messages.begin(), step.messages.end(), [](const Message& message) { return message.from == message.to; }), step.messages.end());
      runs.push_back({world, steps.back(), how});
    }
    run_together(runs);
    worlds_made += (int)runs.size();
  } while (std::chrono::steady_clock::now() < end);
  std::printf("%d communicators\n", worlds_made);
}

const struct {
  const char* name;
  std::function<void()> run;
} scenarios[] = {
    {"shared_memory", shared_memory},
    {"sizes", [] { sizes_and_alignments(true); }},
    {"sizes_ordinary", [] { sizes_and_alignments(false); }},
    {"alignments", every_alignment},
    {"to_itself", to_itself},
    {"one_way", one_way},
    {"both_ways", both_ways},
    {"larger_than_ring", far_larger_than_the_ring},
    {"smallest_rings", smallest_rings},
    {"patterns", [] { patterns(true); }},
    {"patterns_ordinary", [] { patterns(false); }},
    {"five_ranks", five_ranks},
    {"several_to_one_peer", several_to_one_peer},
    {"three_hundred", three_hundred_operations},
    {"sender_ahead", sender_far_ahead},
    {"groups_cut", groups_cut_differently},
    {"tags_32", [] { tags_near((1ull << 32) - 12, 0); }},
    {"tags_64", [] { tags_near(0ull - (1ull << 20), 0); }},
    {"counts_32", [] { tags_near(1, (1ull << 32) - 9); }},
    {"none_holds_up_another", none_holds_up_another},
    {"payload_like_tags", payload_like_tags},
    {"abort", [] { abort_in_the_middle(true); }},
    {"abort_ordinary", [] { abort_in_the_middle(false); }},
    {"grow_stalled", grow_while_stalled},
    {"grow_and_cut", grow_and_cut},
    {"grow_before_use", grow_before_use},
    {"grow_one_side", grow_one_side_first},
    {"grow_head_to_head", head_to_head},
    {"grow_eight_deep", eight_deep},
    {"grow_in_traffic", [] { grow_in_traffic(true); }},
    {"grow_in_traffic_ordinary", [] { grow_in_traffic(false); }},
    {"random", random_groups},
    {"few_resident", few_blocks_resident},
    {"shared_gpus", communicators_share_gpus},
    {"unlike_blocks_hang", unlike_blocks_hang},
};

}  // namespace

int main(int count, char** arguments) {
  const std::string name = count > 1 ? arguments[1] : "";
  seed = count > 2 ? std::strtoull(arguments[2], nullptr, 0) : (uint64_t)std::chrono::system_clock::now().time_since_epoch().count();
  alarm(600);  // ends a hang by a signal
  for (const auto& scenario : scenarios) {
    if (name != scenario.name && name != "all") continue;
    std::printf("%s seed %llu\n", scenario.name, (unsigned long long)seed);
    std::fflush(stdout);
    const auto begin = std::chrono::steady_clock::now();
    scenario.run();
    std::printf("%s: %.2f s, %.1f MB\n", scenario.name, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), (double)bytes_moved / 1e6);
    std::fflush(stdout);
    bytes_moved = 0;
    if (name == scenario.name) return 0;
  }
  if (name == "list")
    for (const auto& scenario : scenarios) std::printf("%s\n", scenario.name);
  return name == "all" || name == "list" ? 0 : 2;
}

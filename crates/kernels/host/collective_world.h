// Ranks in one process for tests of collectives: regions in zeroed memory, launches one after the other on each rank's own thread, and
// every byte compared with collective_reference.h.
#pragma once
#include "../device/collective_kernels.cuh"
#include "../device/collective_list.h"
#include "collective_choice.h"
#include "collective_reference.h"
#include "residency.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <string>

namespace world {

inline host::Machine machine;
inline uint64_t seed;
inline std::atomic<uint64_t> calls_made{0}, bytes_moved{0};

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "FAILED (seed %llu): %s\n", (unsigned long long)seed, what.c_str());
  std::fflush(stderr);
  _exit(1);
}
inline void expect(bool condition, const std::string& what) {
  if (!condition) fail(what);
}
inline uint64_t address_of(const void* at) { return reinterpret_cast<uint64_t>(at); }

// Deliberately wrong: folds from the last rank down.
struct Downward {
  static constexpr bool reduces = true;
  struct Fold {
    uint64_t words[WINDLASS_COLLECTIVE_RANKS_MAX];
    uint32_t ranks;
  };
  static Fold begin(uint64_t x, const Reduction&) { return Fold{{x}, 1}; }
  static void add(Fold& fold, uint64_t x, const Reduction&) { fold.words[fold.ranks++] = x; }
  static uint64_t end(const Fold& fold, const Reduction& how) { return is_of_8(how.type()) ? folded<OrderedReduction>(fold, how) : folded<AnyReduction>(fold, how); }
  template <class Reducer>
  static uint64_t folded(const Fold& fold, const Reduction& how) {
    uint64_t turned[WINDLASS_COLLECTIVE_RANKS_MAX] = {};
    for (uint32_t rank = 0; rank < fold.ranks; ++rank) turned[rank] = fold.words[fold.ranks - 1 - rank];
    return reduce_words<Reducer>(turned, fold.ranks, how);
  }
};

// --- kernels ------------------------------------------------------------------------------------------------------------------

struct Kernel {
  const char *name, *family, *reducer;
  uint32_t ranks, groups, threads_max;
  bool straight;
  void (*run)(const WindlassCollectiveLaunch&);
};
struct BatchKernel {
  const char *name, *family, *reducer;
  uint32_t ranks, groups, threads_max;
  bool straight;
  void (*run)(const WindlassBatchLaunch&);
};
#define WORLD_KERNEL(name, family, reducer, ranks, groups, threads, straight) \
  {#name, #family, #reducer, ranks, groups, threads, straight, &WINDLASS_COLLECTIVE_ENTRY(family, reducer, ranks, groups, straight)},
inline const Kernel kernels[] = {
    WINDLASS_SINGLE_KERNELS(WORLD_KERNEL)
    // GPUs have no such kernels. Here they let every type and operation run in every way.
    WINDLASS_SIMPLE_KERNELS_OF(WORLD_KERNEL, Any, AnyReduction, _whole, true)
    WINDLASS_SIMPLE_KERNELS_OF(WORLD_KERNEL, Any, AnyReduction, , false)
    WORLD_KERNEL(ncclWindlass_AllReduce_Any_2, all_reduce, AnyReduction, 2, 4, 576, false)
    WINDLASS_ALL_REDUCE_KERNELS_OF(WORLD_KERNEL, Down, Downward, , false, 2)
};

inline const BatchKernel batch_kernels[] = {WINDLASS_BATCH_KERNELS(WORLD_KERNEL)};

// The kernel for batches of collectives of this choice, or null.
inline const BatchKernel* batch_kernel_for(const collective::Choice& choice, const std::string& reducer, uint32_t ranks, bool straight) {
  static const std::string families[] = {"batch", "batch_ll128", "batch_all_reduce"};
  for (const BatchKernel& kernel : batch_kernels)
    if (choice.family <= collective::two_phases && kernel.family == families[choice.family] && kernel.reducer == reducer && kernel.ranks >= ranks &&
        kernel.groups == (choice.family == collective::ll ? 0 : choice.groups) && kernel.straight == straight)
      return &kernel;
  return nullptr;
}
inline const Kernel& kernel_for(const collective::Choice& choice, const std::string& reducer, uint32_t ranks, bool straight) {
  static const std::string families[] = {"ll", "ll128", "all_reduce", "simple", "simple_all_reduce", "one_shot", "one_shot_parts"};
  // Some kernels have no straight form.
  const Kernel* found = nullptr;
  for (const Kernel& kernel : kernels) {
    if (kernel.family != families[choice.family] || kernel.reducer != reducer || kernel.ranks < ranks || kernel.groups != (choice.family == collective::ll ? 0 : choice.groups)) continue;
    if (found && kernel.ranks > found->ranks) continue;
    if (kernel.straight == straight || (!kernel.straight && (!found || kernel.ranks < found->ranks))) found = &kernel;
  }
  if (found) return *found;
  fail("no kernel: " + families[choice.family] + " " + reducer + " of " + std::to_string(ranks));
}
inline bool reduces(collective::Kind kind) {
  return kind == collective::all_reduce || kind == collective::reduce || kind == collective::reduce_scatter;
}
// `any`: the kernel for all types, even if this type has one of its own.
inline const char* reducer_for(uint32_t type, uint32_t by, bool any) {
  static const char* const names[] = {"Copy", "SumF32", "SumF16", "SumBf16", "AnyReduction", "OrderedReduction"};
  const uint32_t reducer = windlass_reducer(type, by);
  expect(reducer <= windlass_ordered, "no kernels for this reduction");
  return names[any && reducer != windlass_ordered ? windlass_any : reducer];
}

// --- memory -------------------------------------------------------------------------------------------------------------------

// 128-byte aligned and zeroed, as a region at init.
struct Region {
  std::vector<uint64_t> words;
  uint64_t address = 0;
  void make(size_t bytes) {
    words.assign(bytes / 8 + 17, 0);
    address = (address_of(words.data()) + 127) & ~127ull;
  }
};

// A user buffer between canaries, `offset` bytes beyond an aligned address, and the content that it must have in the end.
struct Buffer {
  static constexpr size_t margin = 48;
  std::vector<uint8_t> bytes, right;
  size_t first = 0;
  void make(size_t size, uint32_t offset) {
    bytes.assign(size + 2 * margin + 32, 0x5e);
    first = ((address_of(bytes.data()) + margin + 15) & ~15ull) + offset - address_of(bytes.data());
  }
  uint64_t address() const { return address_of(bytes.data() + first); }
  void put(uint64_t at, uint64_t element, uint32_t width) { std::memcpy(&bytes[first + at], &element, width); }
  void expects(uint64_t at, uint64_t element, uint32_t width) { std::memcpy(&right[first + at], &element, width); }
};

// --- elements that many calls reduce --------------------------------------------------------------------------------------------

// Keeps the result of each element of a pool from the first call that reduced it; all other calls must get the same.
struct Pool {
  const uint64_t elements;
  std::mutex lock;
  std::vector<uint64_t> bits;
  std::vector<std::string> found_by;  // name of that first call; empty: none yet
  uint64_t compared = 0, unlike = 0;
  std::string first_unlike;

  explicit Pool(uint64_t elements) : elements(elements), bits(elements), found_by(elements) {}
  // Called with `lock` held.
  void tell(uint64_t element, uint64_t found, const std::string& by) {
    if (found_by[element].empty()) {
      bits[element] = found;
      found_by[element] = by;
      return;
    }
    ++compared;
    if (bits[element] == found || unlike++) return;
    char text[100];
    std::snprintf(text, sizeof text, "element %llu is %llx, but ", (unsigned long long)element, (unsigned long long)found);
    first_unlike = text + ("by " + found_by[element]);
    std::snprintf(text, sizeof text, " %llx, by ", (unsigned long long)bits[element]);
    first_unlike += text + by;
  }
};

// --- what is called -----------------------------------------------------------------------------------------------------------

struct Call {
  collective::Kind kind = collective::all_reduce;
  collective::Choice choice = {collective::ll, 2};
  uint64_t count = 0;
  uint32_t type = reference::single, by = reference::sum, root = 0;
  reference::Values values = reference::usual;
  bool in_place = false;
  bool any_kernel = false;  // use the kernel for all types, even if the type has one of its own
  uint32_t send_offset = 0, receive_offset = 0;  // of rank 0; other ranks have others
  uint64_t scalars = 0;  // selects the scalars of a scaled sum: each rank has its own
  // Not null: a reduction of a pool's elements from `first` on. Its results are compared with the pool's, not with the reference.
  Pool* pool = nullptr;
  uint64_t first = 0;
  bool folds_down = false;  // use the deliberately wrong Downward
  // Not empty: numbers of elements [from][to] of an uneven call. A reduction adds [from][to], which is alike for every `from`.
  std::vector<std::vector<uint64_t>> matrix;

  std::string name(uint32_t ranks) const {
    static const char* const families[] = {"LL", "LL128", "two phases", "Simple", "two phases, Simple", "one shot", "one shot, parts"};
    return std::string(collective::kind_names[kind]) + " of " + std::to_string(count) + " " + reference::type_names[type] +
           (reduces(kind) ? std::string(" ") + reference::operation_names[by] : "") + " root " + std::to_string(root) + ", " + families[choice.family] + " " +
           std::to_string(choice.groups) + ", " + std::to_string(ranks) + " ranks" + (in_place ? ", in place" : "") + (matrix.empty() ? "" : ", uneven") +
           ", offsets " + std::to_string(send_offset) + " " + std::to_string(receive_offset) + (pool ? ", from element " + std::to_string(first) : "") +
           (any_kernel ? ", any kernel" : "");
  }
  // The same call, with an operation and a choice for which there are kernels.
  Call by_its_kernels() const {
    Call call = *this;
    if (!collective::has_kernels(type, by)) call.by = reference::sum;
    if (reduces(kind) && collective::is_ordered(type, by)) call.choice = collective::ordered_choice(kind, call.choice), call.any_kernel = true;
    return call;
  }
  const char* reducer() const { return !reduces(kind) ? "Copy" : folds_down ? "Downward" : reducer_for(type, by, any_kernel); }
};

struct Options {
  uint32_t ranks = 2, channels = 4, slots = 4, one_shot_channels = 5, one_shot_slots = 13;
  bool often_fewer_channels = true;
  uint64_t first_tag = 1;
  uint64_t first_count = 0;  // packets that every channel has counted before the first call
};

struct How {
  uint32_t late_microseconds = 0;  // each rank begins each call up to this late
  uint32_t slow_rank = ~0u;        // this rank begins later, by slow_microseconds
  uint32_t slow_microseconds = 2000;
  bool slow_in_turn = false;       // every rank is the slow one for a time
  uint32_t blocks_max = 3, role_warps_max = 2;
  bool grid_by_rank = false;       // each rank has a grid of its own for good; rank 0 one warp a role
  bool grids_alike = false;        // each call has a grid of its own, the same on all ranks, as in the product. If false, all blocks must be resident
  std::vector<uint32_t> blocks_of_rank = {};  // not empty: number of blocks of each rank's grids
  std::function<void(uint32_t, size_t)> turn = {};  // waits until this rank may launch this kernel
  uint32_t batches_of = 1;         // up to so many calls that follow each other are one kernel
  bool batches_full = false;       // a batch takes as many calls as fit, not a random number
};

struct World {
  Options options;
  CollectiveLayout layout;
  std::vector<Region> regions;
  std::vector<uint64_t> region_addresses;
  uint32_t control = 0;
  bool ends_when_asked = false;  // some rank is known to wait, so that the host's question ends the calls
  std::vector<WindlassP2pReport> reports;
  std::vector<std::vector<uint64_t>> digests;  // [rank][call]
  std::atomic<uint32_t> begun{0};              // launches
  residency::Gpus* gpus = nullptr;             // null: all blocks are resident

  explicit World(const Options& o) : options(o), layout(layout_of(geometry(0))), regions(o.ranks), reports(o.ranks), digests(o.ranks) {
    std::memset(reports.data(), 0, reports.size() * sizeof(WindlassP2pReport));
    for (Region& region : regions) {
      region.make(layout.bytes);
      region_addresses.push_back(region.address);
      for (const WindlassWire& wire : {layout.ll128, layout.results})
        for (uint64_t at = 0; at < o.channels * WINDLASS_CHANNEL_BYTES; at += 8) word(region.address + wire.channels + at) = o.first_count;
      for (const Counts& counts : counts_of_launches())
        for (uint32_t channel = 0; channel < counts.channels; ++channel) word(region.address + counts.at + channel * WINDLASS_LL_COUNT_BYTES) = o.first_count;
    }
  }
  static CollectiveLayout layout_of(const CollectiveGeometry& geometry) { return windlass_layout(&geometry); }
  CollectiveGeometry geometry(uint32_t rank) const { return {options.first_tag, rank, options.ranks, options.channels, options.slots, options.one_shot_channels, options.one_shot_slots}; }
  // The wires whose channels count launches.
  struct Counts {
    const char* name;
    uint64_t at;
    uint32_t channels;
  };
  std::vector<Counts> counts_of_launches() const { return {{"LL", layout.ll.channels, options.channels}, {"one-shot", layout.one_shot.channels, options.one_shot_channels}}; }
  static uint64_t& word(uint64_t address) { return *reinterpret_cast<uint64_t*>(address); }
  uint64_t& channel_word(uint32_t rank, const WindlassWire& wire, uint32_t channel, uint32_t which) {
    return word(regions[rank].address + wire.channels + channel * WINDLASS_CHANNEL_BYTES + 8 * which);
  }

  // One launch and its synchronisation.
  void launch(WindlassCollectiveLaunch& launch, const Kernel& kernel, collective::Family family, uint32_t blocks, uint32_t role_warps, uint64_t random) {
    const uint32_t warps_max = (kernel.threads_max - collective::threads(family, 0)) / 32 / collective::roles(family);
    fill(launch, role_warps < warps_max ? role_warps : warps_max);
    run(launch.rank, blocks, family, launch.role_warps, random, [&] { kernel.run(launch); });
  }
  void launch(WindlassBatchLaunch& batch, const BatchKernel& kernel, collective::Family family, uint32_t blocks, uint32_t role_warps, uint64_t random) {
    fill(batch.launch, role_warps);
    run(batch.launch.rank, blocks, family, role_warps, random, [&] { kernel.run(batch); });
  }
  // In clusters of 4 if the grid is a multiple of 4, as in the product from three blocks on.
  void run(uint32_t rank, uint32_t blocks, collective::Family family, uint32_t role_warps, uint64_t random, const std::function<void()>& body) {
    machine.launch(blocks, collective::threads(family, role_warps), collective::shared_bytes(family), random, body, gpus ? &gpus->devices[rank] : nullptr,
                   blocks % 4 ? 1 : 4);
  }
  void fill(WindlassCollectiveLaunch& launch, uint32_t role_warps) {
    ++begun;
    launch.role_warps = role_warps;
    launch.control = address_of(&control);
    launch.report = address_of(&reports[launch.rank]);
  }
  void abort() { __atomic_store_n(&control, (uint32_t)WINDLASS_CONTROL_ABORT, __ATOMIC_RELEASE); }
  bool aborted() const {
    const uint32_t word = __atomic_load_n(&control, __ATOMIC_ACQUIRE);
    return word == WINDLASS_CONTROL_ABORT || (ends_when_asked && word == WINDLASS_CONTROL_ASK);
  }

  // Checks at the end that every LL128 packet sent was received, that no rank counts an unsent one as consumed, and that at most half a ring lacks
  // credit and proof.
  void check_words() {
    for (uint32_t rank = 1; rank < options.ranks; ++rank)
      for (const Counts& counts : counts_of_launches())
        for (uint32_t channel = 0; channel < counts.channels; ++channel) {
          const uint64_t at = counts.at + channel * WINDLASS_LL_COUNT_BYTES, own = word(regions[rank].address + at), first = word(regions[0].address + at);
          expect(own == first, "ranks 0 and " + std::to_string(rank) + " have used channel " + std::to_string(channel) + " of " + counts.name + " " + std::to_string(first) + " and " + std::to_string(own) + " times");
        }
    for (const WindlassWire& wire : {layout.ll128, layout.results})
      for (uint32_t channel = 0; channel < options.channels; ++channel)
        for (uint32_t from = 0; from < options.ranks; ++from)
          for (uint32_t to = 0; to < options.ranks; ++to) {
            if (from == to) continue;
            const uint64_t sent = channel_word(from, wire, channel, WINDLASS_CHANNEL_SENT), received = channel_word(to, wire, channel, WINDLASS_CHANNEL_RECEIVED);
            const uint64_t credit = channel_word(from, wire, channel, WINDLASS_CHANNEL_CREDIT + to), proven = channel_word(from, wire, channel, WINDLASS_CHANNEL_PROVEN);
            const std::string where = " from rank " + std::to_string(from) + " to " + std::to_string(to) + " on channel " + std::to_string(channel) + ": sent " +
                                      std::to_string(sent) + ", received " + std::to_string(received) + ", credit " + std::to_string(credit) + ", proven " + std::to_string(proven);
            expect(sent == received, "numbers sent and received differ" + where);
            expect(credit <= sent && proven <= sent, "more is consumed than was sent" + where);
            expect(sent - std::max(credit, proven) <= options.slots / 2, "too little is proven" + where);
          }
  }
};

// --- one rank's calls -----------------------------------------------------------------------------------------------------------

struct Rank {
  World& world;
  const uint32_t me;
  host::Random random;
  Buffer out, in;
  // Memory for this rank's scalar if it is given by its address, with other bytes around it.
  alignas(8) uint8_t scalar_memory[24] = {};
  // For a call on a pool: the place of each element.
  struct Taken {
    bool is_in_out;
    uint64_t at, element;
  };
  std::vector<Taken> taken = {};

  uint32_t ranks() const { return world.options.ranks; }

  void run(const std::vector<Call>& asked, const How& how) {
    std::vector<Call> calls;
    for (const Call& call : asked) calls.push_back(call.by_its_kernels());
    const uint32_t own_blocks = me == 0 ? 1 : 1 + (uint32_t)random.below(how.blocks_max), own_warps = me == 0 ? 1 : 1 + (uint32_t)random.below(how.role_warps_max);
    size_t next = 0, launches = 0;
    for (size_t index = 0; index < calls.size() && !world.aborted(); index = next) {
      if (how.late_microseconds && random.below(2)) usleep((useconds_t)random.below(how.late_microseconds));
      const uint32_t slow = how.slow_in_turn ? (uint32_t)(index / 8) % ranks() : how.slow_rank;
      if (slow == me && (!how.slow_in_turn || index % 8 == 0)) usleep(how.slow_microseconds);
      host::Random of_call{seed ^ index << 20};
      const uint32_t blocks = !how.blocks_of_rank.empty() ? how.blocks_of_rank[me] : how.grid_by_rank ? own_blocks : 1 + (uint32_t)(how.grids_alike ? of_call : random).below(how.blocks_max);
      const uint32_t warps = how.grid_by_rank ? own_warps : 1 + (uint32_t)random.below(how.role_warps_max);
      next = index + batch_length(calls, index, how);
      if (how.turn) how.turn(me, launches++);
      if (how.batches_of > 1 && goes_in_batches(calls[index]))
        batch(calls, index, next, blocks, warps);
      else
        call(calls[index], index, blocks, warps);
    }
  }

  const BatchKernel* batch_kernel(const Call& call, bool straight) const {
    return batch_kernel_for(call.choice, call.reducer(), ranks(), straight);
  }
  // Whether there is a batch kernel for the call: over LL for all calls, over LL128 for those that the product batches.
  bool goes_in_batches(const Call& call) const {
    const collective::Family family = call.choice.family;
    const bool fits = family == collective::ll || (family == collective::two_phases && call.kind == collective::all_reduce) ||
                      (family == collective::ll128 && (call.kind == collective::all_gather || call.kind == collective::reduce_scatter));
    return fits && call.matrix.empty() && batch_kernel(call, false);
  }

  // The number of calls from `first` on that one kernel runs, alike on all ranks.
  size_t batch_length(const std::vector<Call>& calls, size_t first, const How& how) const {
    const uint32_t most = how.batches_of;
    if (most == 1 || !goes_in_batches(calls[first])) return 1;
    const collective::Family family = calls[first].choice.family;
    host::Random of_first{seed ^ first};
    const size_t wanted = how.batches_full ? most : 1 + of_first.below(most);
    uint64_t packets = 0;
    size_t length = 0;
    for (; length < wanted && first + length < calls.size(); ++length) {
      const Call& call = calls[first + length];
      const bool alike = call.choice.family == family && call.choice.groups == calls[first].choice.groups && goes_in_batches(call) && reduces(call.kind) == reduces(calls[first].kind) &&
                         (!reduces(call.kind) || (call.type == calls[first].type && call.by == calls[first].by && call.any_kernel == calls[first].any_kernel));
      packets += (call.count * reference::element_bytes[call.type] + WINDLASS_LL_PAYLOAD_BYTES - 1) / WINDLASS_LL_PAYLOAD_BYTES;
      if (length && (!alike || (family == collective::ll && packets > WINDLASS_BATCH_ENTRIES) || length == WINDLASS_BATCH_CALLS_MAX)) break;
    }
    return length;
  }

  // Runs several calls by one kernel, each with buffers of its own.
  void batch(const std::vector<Call>& calls, size_t first, size_t last, uint32_t blocks, uint32_t role_warps) {
    struct Buffers {
      Buffer out, in;
      std::vector<Taken> taken;
    };
    std::vector<Buffers> buffers;
    WindlassBatchLaunch batch;
    std::memset(&batch, 0, sizeof batch);
    const collective::Family family = calls[first].choice.family;
    uint32_t packets = 0;
    bool straight = true;
    for (size_t index = first; index < last; ++index) {
      const WindlassCollectiveLaunch launch = prepare(calls[index], index);
      if (index == first) batch.launch = launch;
      straight &= collective::straight(launch, calls[index].choice) && !calls[index].any_kernel;
      const auto& receive = launch.receive;
      const bool one_result = reduces(calls[index].kind) && family != collective::two_phases;
      batch.calls[index - first] = {launch.send[0],
                                    one_result ? receive[me] : receive[0],
                                    (uint32_t)(launch.send[1] - launch.send[0]),
                                    one_result ? 0 : (uint32_t)(receive[1] - receive[0]),
                                    (uint32_t)(calls[index].count * reference::element_bytes[calls[index].type]),
                                    packets};
      packets += (uint32_t)launch.packets;
      buffers.push_back({std::move(out), std::move(in), std::move(taken)});
    }
    batch.count = (uint32_t)(last - first);
    batch.launch.packets = packets;
    batch.launch.used_channels = fewer_channels(std::min(packets, world.options.channels), first);
    // Now and then the list is shorter than it need be, so that several calls share an entry.
    while (packets > (uint32_t)WINDLASS_BATCH_ENTRIES << batch.packets_log2) ++batch.packets_log2;
    if (family != collective::ll) batch.packets_log2 += seed % 4;
    for (uint32_t place = 0; place < batch.count; ++place) {
      const uint32_t end = place + 1 < batch.count ? batch.calls[place + 1].first_packet : packets;
      for (uint32_t packet = batch.calls[place].first_packet; packet < end; ++packet)
        if (packet % (1u << batch.packets_log2) == 0) batch.call_of_packet[packet >> batch.packets_log2] = (uint8_t)place;
    }
    const BatchKernel* const whole = straight ? batch_kernel(calls[first], true) : nullptr;
    const BatchKernel& kernel = whole ? *whole : *batch_kernel(calls[first], false);
    const uint32_t warps_max = kernel.threads_max / 32 / collective::roles(family);
    world.launch(batch, kernel, family, blocks, std::min(role_warps, warps_max), random.next());
    if (world.aborted()) return;
    for (size_t index = first; index < last; ++index) {
      out = std::move(buffers[index - first].out);
      in = std::move(buffers[index - first].in);
      taken = std::move(buffers[index - first].taken);
      compare(calls[index]);
    }
  }

  void call(const Call& call, uint64_t index, uint32_t blocks, uint32_t role_warps) {
    WindlassCollectiveLaunch launch = prepare(call, index);
    if (call.choice.family != collective::ll && !collective::is_one_shot(call.choice.family)) launch.used_channels = fewer_channels(launch.used_channels, index);
    const Kernel& kernel = kernel_for(call.choice, call.reducer(), ranks(), collective::straight(launch, call.choice) && !call.any_kernel);
    world.launch(launch, kernel, call.choice.family, blocks, role_warps, random.next());
    if (!world.aborted()) compare(call);
  }

  // Half of the calls use only some of the channels, the same on all ranks, as the product uses whole rounds of its warps' channels.
  uint32_t fewer_channels(uint32_t channels, uint64_t index) const {
    const uint64_t any = reference::mixed(seed ^ (index + 1) << 20);
    return world.options.often_fewer_channels && channels > 1 && any % 2 ? 1 + (uint32_t)(any / 2 % channels) : channels;
  }

  // Makes a call's buffers, their right results and the launch.
  WindlassCollectiveLaunch prepare(const Call& call, uint64_t index) {
    const reference::Inputs inputs{world::seed, world.options.first_tag, call.values, call.type, call.pool != nullptr, call.first};
    taken.clear();
    const uint32_t width = reference::element_bytes[call.type], step = reduces(call.kind) ? width : 1;
    WindlassCollectiveLaunch launch;
    // Each rank's pointers have another alignment.
    const uint32_t send_offset = (call.send_offset + me * 3 * step) % 16 / step * step, receive_offset = (call.receive_offset + me * 5 * step) % 16 / step * step;
    if (call.matrix.empty())
      arrange_call(call, index, inputs, width, send_offset, receive_offset, launch);
    else
      arrange_uneven(call, index, inputs, width, send_offset, receive_offset, launch);
    return launch;
  }

  // This rank's scalar, as the launch passes it.
  struct Scalar {
    uint64_t bits_or_address;
    bool is_address;
  };
  Scalar scalar_of(const Call& call, uint64_t index, const reference::Inputs& inputs) {
    if (!reduces(call.kind) || call.by != reference::scaled_sum) return {0, false};
    const uint64_t bits = inputs.scalar(call.scalars, me);
    if (reference::mixed(seed ^ index << 8 ^ me) % 2) return {bits, false};
    const uint32_t width = reference::element_bytes[call.type];
    std::memset(scalar_memory, 0xa5, sizeof scalar_memory);
    uint8_t* const at = scalar_memory + (8 + index * width % 8);
    std::memcpy(at, &bits, width);
    return {address_of(at), true};
  }

  static CollectiveReduction of_call(const Call& call, const Scalar& scalar) { return {scalar.bits_or_address, call.type, call.by, scalar.is_address, 0}; }

  // Compares the buffers with the right results.
  void compare(const Call& call) {
    const uint32_t width = reference::element_bytes[call.type];
    if (call.pool) {
      const std::string name = call.name(ranks());
      const std::lock_guard<std::mutex> guard(call.pool->lock);
      for (const Taken& one : taken) {
        Buffer& buffer = one.is_in_out ? out : in;
        uint64_t bits = 0;
        std::memcpy(&bits, &buffer.bytes[buffer.first + one.at], width);
        buffer.expects(one.at, bits, width);
        call.pool->tell(one.element, bits, name);
      }
    }
    check(out, call, "sent");
    check(in, call, "received");
    ++calls_made;
    bytes_moved += call.count * width;
    // A digest of results that must be bitwise equal on all ranks, NaNs too.
    uint64_t digest = 0;
    if (call.matrix.empty() && (call.kind == collective::all_reduce || call.kind == collective::all_gather)) {
      const Buffer& result = call.in_place && call.kind == collective::all_reduce ? out : in;
      const uint64_t bytes = call.count * width * (call.kind == collective::all_gather ? ranks() : 1);
      for (uint64_t at = 0; at < bytes; ++at) digest = (digest ^ result.bytes[result.first + at]) * 0x100000001b3ull + 1;
    }
    world.digests[me].push_back(digest);
  }

  uint64_t reduced(const Call& call, uint64_t index, const reference::Inputs& inputs, uint64_t place) const {
    return reference::reduce(call.type, call.by, ranks(), [&](uint32_t rank) {
      const uint64_t element = inputs.element(index, rank, place);
      return call.by == reference::scaled_sum ? reference::scaled(call.type, element, inputs.scalar(call.scalars, rank)) : element;
    });
  }
  void expect_reduced(Buffer& target, uint64_t at, const Call& call, uint64_t index, const reference::Inputs& inputs, uint64_t place) {
    if (call.pool)
      taken.push_back({&target == &out, at, call.first + place});
    else
      target.expects(at, reduced(call, index, inputs, place), reference::element_bytes[call.type]);
  }

  // Buffers as NCCL defines them: in place both are one.
  void arrange_call(const Call& call, uint64_t index, const reference::Inputs& inputs, uint32_t width, uint32_t send_offset, uint32_t receive_offset, WindlassCollectiveLaunch& launch) {
    using namespace collective;
    const uint64_t count = call.count, all = count * ranks();
    const bool sends = call.kind != broadcast || me == call.root, receives = call.kind != reduce || me == call.root;
    const uint64_t send_count = !sends ? 0 : call.kind == reduce_scatter || call.kind == all_to_all ? all : count;
    const uint64_t receive_count = !receives ? 0 : call.kind == all_gather || call.kind == all_to_all ? all : count;
    const bool in_place = call.in_place && call.kind != all_to_all && sends && receives;
    // In place, the larger buffer serves as both; the smaller one is this rank's part of it.
    Buffer& target = in_place && call.kind != all_gather ? out : in;
    Buffer& source = in_place && call.kind == all_gather ? in : out;
    const uint64_t source_at = in_place && call.kind == all_gather ? me * count * width : 0, target_at = in_place && call.kind == reduce_scatter ? me * count * width : 0;
    out.make(&source == &out ? send_count * width : 0, send_offset);
    in.make(&target == &in ? receive_count * width : 0, receive_offset);
    for (uint64_t at = 0; at < send_count; ++at) source.put(source_at + at * width, inputs.element(index, me, at), width);
    out.right = out.bytes;
    in.right = in.bytes;
    for (uint64_t at = 0; at < receive_count; ++at) {
      const uint32_t part = (uint32_t)(at / count);
      if (reduces(call.kind)) {
        expect_reduced(target, target_at + at * width, call, index, inputs, call.kind == reduce_scatter ? me * count + at : at);
        continue;
      }
      uint64_t element = 0;
      switch (call.kind) {
        case broadcast: element = inputs.element(index, call.root, at); break;
        case all_gather: element = inputs.element(index, part, at % count); break;
        case all_to_all: element = inputs.element(index, part, me * count + at % count); break;
        default: break;
      }
      target.expects(target_at + at * width, element, width);
    }
    const Scalar scalar = scalar_of(call, index, inputs);
    launch = arrange(call.kind, {of_call(call, scalar), count, source.address() + source_at, target.address() + target_at, 0, width, call.root, 0}, world.geometry(me),
                     world.region_addresses.data(), call.choice);
  }

  // Makes launches of all-gather-v, reduce-scatter-v and the like: each pair of ranks has a size of its own.
  void arrange_uneven(const Call& call, uint64_t index, const reference::Inputs& inputs, uint32_t width, uint32_t send_offset, uint32_t receive_offset, WindlassCollectiveLaunch& launch) {
    using namespace collective;
    const bool reducing = reduces(call.kind), same = call.kind == all_gather;
    const auto& matrix = call.matrix;
    uint64_t send_at[WINDLASS_COLLECTIVE_RANKS_MAX + 1] = {}, receive_at[WINDLASS_COLLECTIVE_RANKS_MAX + 1] = {}, largest = 0;
    for (uint32_t rank = 0; rank < ranks(); ++rank) {
      send_at[rank + 1] = send_at[rank] + (same ? (rank + 1 == ranks() ? matrix[me][me] : 0) : matrix[me][rank]);
      receive_at[rank + 1] = receive_at[rank] + (reducing ? (rank == me ? matrix[me][me] : 0) : matrix[rank][me]);
      for (uint32_t to = 0; to < ranks(); ++to) largest = std::max(largest, matrix[rank][to]);
    }
    out.make(send_at[ranks()] * width, send_offset);
    in.make(receive_at[ranks()] * width, receive_offset);
    for (uint64_t at = 0; at < send_at[ranks()]; ++at) out.put(at * width, inputs.element(index, me, at), width);
    out.right = out.bytes;
    in.right = in.bytes;
    // The place of this rank's part in what `from` sends, in elements.
    const auto part_at = [&](uint32_t from) {
      uint64_t at = 0;
      for (uint32_t to = 0; to < me && !same; ++to) at += matrix[from][to];
      return at;
    };
    expect(call.choice.family == ll128, "uneven calls go by LL128");
    if (same || reducing) {
      UnevenRequest request{of_call(call, scalar_of(call, index, inputs)), {}, same ? out.address() : in.address(), reducing, 0};
      for (uint32_t rank = 0; rank < ranks(); ++rank)
        request.parts[rank] = same ? UnevenPart{in.address() + receive_at[rank] * width, matrix[rank][me] * width}
                                   : UnevenPart{out.address() + send_at[rank] * width, matrix[me][rank] * width};
      launch = collective::arrange_uneven(request, world.geometry(me), world.region_addresses.data(), call.choice);
    } else {
      // Tags, wires and channels are those of an even call of the largest part; all sizes and places are then set here.
      launch = arrange(all_to_all, {{}, largest, 0, 0, 0, width, 0, 0}, world.geometry(me), world.region_addresses.data(), call.choice);
      launch.flags &= ~(uint32_t)WINDLASS_COLLECTIVE_EVEN;
      for (uint32_t rank = 0; rank < ranks(); ++rank) {
        launch.send[rank] = out.address() + send_at[rank] * width;
        launch.send_bytes[rank] = matrix[me][rank] * width;
        launch.receive[rank] = in.address() + receive_at[rank] * width;
        launch.receive_bytes[rank] = matrix[rank][me] * width;
      }
    }
    for (uint32_t rank = 0; rank < ranks() && !reducing; ++rank)
      for (uint64_t at = 0; at < matrix[rank][me]; ++at) in.expects((receive_at[rank] + at) * width, inputs.element(index, rank, part_at(rank) + at), width);
    for (uint64_t at = 0; reducing && at < matrix[me][me]; ++at) expect_reduced(in, at * width, call, index, inputs, part_at(0) + at);
  }

  void check(const Buffer& buffer, const Call& call, const char* what) const {
    if (buffer.bytes.size() == 0 || std::memcmp(buffer.bytes.data(), buffer.right.data(), buffer.bytes.size()) == 0) return;
    const uint32_t width = reference::element_bytes[call.type];
    for (size_t at = buffer.first % width; at < buffer.bytes.size(); at += width) {
      uint64_t is = 0, right = 0;
      const size_t bytes = std::min<size_t>(width, buffer.bytes.size() - at);
      std::memcpy(&is, &buffer.bytes[at], bytes);
      std::memcpy(&right, &buffer.right[at], bytes);
      // Host and GPU choose themselves which of several 64-bit NaNs results; digests check that it is the same on all ranks.
      if (is == right || (call.type == reference::wide && reference::is_nan(call.type, is) && reference::is_nan(call.type, right))) continue;
      char text[200];
      std::snprintf(text, sizeof text, ": rank %u's %s byte %lld: element %llx, not %llx", me, what, (long long)at - (long long)buffer.first, (unsigned long long)is, (unsigned long long)right);
      fail(call.name(ranks()) + text);
    }
  }
};

// The calls of one communicator, and how its ranks make them.
struct Run {
  World& world;
  const std::vector<Call>& calls;
  const How& how;
};

// Runs all ranks of all communicators at once, each with all its calls. False: they would wait for ever, and were aborted.
inline bool all_end(const std::vector<Run>& runs, residency::milliseconds patience = residency::patience) {
  host::Random random{seed ^ 0x5eed};
  residency::Threads threads;
  for (const Run& run : runs) {
    for (std::vector<uint64_t>& digests : run.world.digests) digests.clear();
    for (uint32_t rank = 0; rank < run.world.options.ranks; ++rank) {
      const uint64_t own = random.next();
      threads.start([run, rank, own] { Rank{run.world, rank, {own}, {}, {}}.run(run.calls, run.how); });
    }
  }
  return threads.join(
      [&] {
        for (const Run& run : runs) run.world.abort();
      },
      patience);
}

inline void print_reports(const World& world) {
  for (uint32_t rank = 0; rank < world.options.ranks; ++rank)
    for (uint32_t i = 0; i < std::min<uint32_t>(world.reports[rank].claimed, 4); ++i) {
      const WindlassP2pReportEntry& entry = world.reports[rank].entries[i];
      std::fprintf(stderr, "rank %u in call %zu waits for rank %u, channel %u, what %u, packet %llu, seen %llu\n", rank, world.digests[rank].size(), entry.peer, entry.channel, entry.waited_for,
                   (unsigned long long)entry.sequence, (unsigned long long)entry.seen);
    }
}

// The same, and checks all results. Ranks that wait for ever print their reports.
inline void run_together(const std::vector<Run>& runs) {
  if (!all_end(runs)) {
    for (const Run& run : runs) print_reports(run.world);
    fail("the ranks wait for ever, " + (runs[0].world.gpus ? runs[0].world.gpus->name() : "all blocks resident"));
  }
  for (const Run& run : runs) {
    World& world = run.world;
    for (size_t index = 0; index < run.calls.size(); ++index)
      for (uint32_t rank = 1; rank < world.options.ranks; ++rank)
        expect(world.digests[rank][index] == world.digests[0][index], run.calls[index].name(world.options.ranks) + ": ranks have different results");
    world.check_words();
  }
}
inline void run(World& world, const std::vector<Call>& calls, const How& how = {}) { run_together({{world, calls, how}}); }

}  // namespace world

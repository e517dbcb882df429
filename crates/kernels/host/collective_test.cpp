// Tests the kernels of collectives on threads of this host: ranks, regions and checks are those of collective_world.h.
// Usage: collective_test SCENARIO [SEED [all [RANKS]]]. Prints the seed; exits 0 only if every byte is right and none beside it was
// touched. With `all`, `exhaustive` tries each count with each combination, for RANKS only if given.
#include "collective_world.h"

namespace {

using collective::Choice;
using collective::Kind;
using collective::packet_bytes;
using world::Call;
using world::expect;
using world::How;
using world::Options;
using world::World;

#if HOST_TSAN
constexpr int scale = 10;  // fewer and smaller: a sanitized run is many times slower
#else
constexpr int scale = 1;
#endif

constexpr Kind kinds[] = {collective::all_reduce, collective::broadcast, collective::reduce, collective::all_gather, collective::reduce_scatter, collective::all_to_all};

// The ways in which a collective may run. Over LL128 an all-reduce in one phase cannot be in place: a sending warp would read results.
std::vector<Choice> choices_of(Kind kind, uint32_t ranks) {
  std::vector<Choice> choices = {{collective::ll128, 2}};
  // LL is for collectives in which every rank sends to every other one.
  if (kind != collective::broadcast && kind != collective::reduce) choices.push_back({collective::ll, 2});
  if (ranks <= 4) choices.push_back({collective::ll128, 4});
  if (kind == collective::all_reduce || kind == collective::reduce) choices.push_back({collective::two_phases, 2});
  if (ranks == 2 && (kind == collective::all_reduce || kind == collective::reduce)) choices.push_back({collective::two_phases, 4});
  if (kind == collective::all_reduce) choices.push_back({collective::one_shot, ranks <= 4 ? 4u : 2u});
  if (kind == collective::all_gather || kind == collective::reduce_scatter) choices.push_back({collective::one_shot_parts, ranks <= 4 ? 4u : 2u});
  // Kernels for large reductions.
  if (ranks <= 4 && kind == collective::all_reduce) choices.push_back({collective::simple_two_phases, 4});
  if (ranks <= 4 && kind == collective::reduce_scatter) choices.push_back({collective::simple, 4});
  return choices;
}
bool may_be_in_place(Kind kind, const Choice& choice) { return kind != collective::all_reduce || choice.family != collective::ll128; }

uint64_t ring_bytes(const Options& o, const Choice& choice) {
  if (collective::is_one_shot(choice.family)) return o.one_shot_slots * packet_bytes(choice);
  return o.channels * packet_bytes(choice) * (choice.family == collective::ll ? (uint32_t)WINDLASS_LL_SLOTS : o.slots);
}
// The most bytes of a connection.
uint64_t bytes_max(const Options& o, const Choice& choice) {
  if (collective::is_one_shot(choice.family)) return ring_bytes(o, choice);
  return choice.family == collective::ll ? o.channels * packet_bytes(choice) : ~0ull;
}

// A random call of this kind and choice, with `bytes` on its largest connection.
Call any_call(host::Random& random, Kind kind, const Choice& choice, uint32_t ranks, uint64_t bytes) {
  Call call;
  call.kind = kind;
  call.choice = choice;
  call.type = (uint32_t)random.below(reference::types);
  call.by = (uint32_t)random.below(reference::operations);
  call.root = (uint32_t)random.below(ranks);
  call.any_kernel = random.below(2);
  call.scalars = random.next();
  call.in_place = random.below(2) && may_be_in_place(kind, choice);
  call.count = bytes / reference::element_bytes[call.type];
  if (random.below(2)) {
    call.send_offset = (uint32_t)random.below(16);
    call.receive_offset = (uint32_t)random.below(16);
  }
  return call;
}
Choice one_of(host::Random& random, const std::vector<Choice>& choices) { return choices[random.below(choices.size())]; }

// Nothing, little, or up to `rings` times what the ring holds.
uint64_t any_bytes(host::Random& random, const Options& o, const Choice& choice, uint64_t rings) {
  const auto any = [&]() -> uint64_t {
    switch (random.below(8)) {
      case 0: return random.below(3) * random.below(20);
      case 1:
      case 2: return random.below(2 * packet_bytes(choice));
      case 3: return ring_bytes(o, choice) / 2 + random.below(64);
      case 4: return ring_bytes(o, choice) - random.below(2) * random.below(64);
      case 5: return random.below(rings * ring_bytes(o, choice));
      default: return random.below(ring_bytes(o, choice));
    }
  };
  return std::min(any(), bytes_max(o, choice));
}
Call any_call(host::Random& random, const Options& o, uint64_t rings = 2) {
  const Kind kind = kinds[random.below(collective::kinds)];
  const Choice choice = one_of(random, choices_of(kind, o.ranks));
  return any_call(random, kind, choice, o.ranks, any_bytes(random, o, choice, rings));
}

template <class Item>
void shuffle(std::vector<Item>& items, host::Random& random) {
  for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[random.below(i)]);
}

// --- scenarios ----------------------------------------------------------------------------------------------------------------

// Counts 0 to 65 of every collective, way, type and operation, at any offset, in place and not. Each combination gets some counts,
// others with each seed, and all else at random. With `all` it gets all 66 counts, each in and out of place: at aligned addresses by
// the type's own kernel and by that for all types, and at two pairs of other offsets.
bool all_of_each = false;
uint32_t ranks_wanted = 0;  // 0: all numbers of ranks
struct Variant { bool any_kernel; uint32_t send_offset, receive_offset; };
const Variant variants[] = {{false, 0, 0}, {true, 0, 0}, {true, 1, 0}, {true, 3, 7}};

void all_variants(const Call& like, uint32_t ranks, std::vector<Call>& calls) {
  for (uint32_t count = 0; count < 66; ++count)
    for (const Variant& variant : variants)
      for (int in_place = 0; in_place <= (int)may_be_in_place(like.kind, like.choice); ++in_place) {
        Call call = like;
        call.count = count;
        call.root = (count + like.type) % ranks;
        call.any_kernel = variant.any_kernel;
        call.send_offset = variant.send_offset;
        call.receive_offset = variant.receive_offset;
        call.in_place = in_place;
        calls.push_back(call);
      }
}

void exhaustive() {
  host::Random random{world::seed};
  How how;  // hardly any warp has two channels to serve
  how.blocks_max = 2;
  how.role_warps_max = 1;
  for (uint32_t ranks : {2, 3, 4, 5, 8}) {
    if (ranks_wanted && ranks != ranks_wanted) continue;
    Options o;
    o.ranks = ranks;
    World world(o);
    std::vector<Call> calls;
    for (Kind kind : kinds)
      for (const Choice& choice : choices_of(kind, ranks))
        for (uint32_t type = 0; type < reference::types; ++type)
          for (uint32_t by = 0; by < (world::reduces(kind) ? reference::operations : 1); ++by) {
            if (world::reduces(kind) && !collective::has_kernels(type, by)) continue;
            // Reductions that run in fixed order only have one choice.
            if (world::reduces(kind) && collective::is_ordered(type, by) && choice != collective::ordered_choice(kind, choice)) continue;
            Call call = any_call(random, kind, choice, ranks, 0);
            call.type = type;
            call.by = by;
            if (all_of_each) {
              all_variants(call, ranks, calls);
              continue;
            }
            for (uint32_t sample = 0; sample < 16 / ranks; ++sample) {
              Call one = any_call(random, kind, choice, ranks, 0);
              one.type = type;
              one.by = by;
              one.count = random.below(66);
              calls.push_back(one);
            }
          }
    shuffle(calls, random);
    world::run(world, calls, how);
    std::printf("%u ranks: %zu calls\n", ranks, calls.size());
  }
}

// Sizes around those of packets, of a packet on each channel, and of rings, on every way.
void sizes() {
  host::Random random{world::seed};
  for (uint32_t ranks : {2, 4}) {
    Options o;
    o.ranks = ranks;
    World world(o);
    std::vector<Call> calls;
    for (Kind kind : kinds)
      for (const Choice& choice : choices_of(kind, ranks)) {
        const uint64_t packet = packet_bytes(choice), ring = ring_bytes(o, choice);
        for (uint64_t around : {packet, 2 * packet, o.channels * packet, ring / 2, ring, ring + o.channels * packet, 3 * ring, ranks * packet, ranks * o.channels * packet})
          for (int by : {-16, -1, 0, 1, 16}) {
            Call call = any_call(random, kind, choice, ranks, 0);
            call.type = random.below(2) ? reference::uint8 : reference::single;
            call.count = std::min(around + (uint64_t)(int64_t)by, bytes_max(o, choice)) / reference::element_bytes[call.type];
            if (random.below(2)) calls.push_back(call);
          }
      }
    shuffle(calls, random);
    world::run(world, calls);
  }
}

// NaNs, both zeros, infinities, subnormals, and integers at the ends of their range, in every reduction.
void special_values() {
  host::Random random{world::seed};
  for (uint32_t ranks : {2, 3, 8}) {
    Options o;
    o.ranks = ranks;
    o.channels = 16;  // as LL holds at most one packet a channel
    World world(o);
    std::vector<Call> calls;
    for (Kind kind : {collective::all_reduce, collective::reduce, collective::reduce_scatter})
      for (uint32_t type = 0; type < reference::types; ++type)
        for (uint32_t by = 0; by < reference::operations; ++by)
          for (int sample = 0; sample < 4 && collective::has_kernels(type, by); ++sample) {
            Call call = any_call(random, kind, one_of(random, choices_of(kind, ranks)), ranks, 0);
            call.type = type;
            call.by = by;
            call.count = 200 + random.below(200);
            call.values = reference::special;
            calls.push_back(call);
          }
    world::run(world, calls);
  }
}

// Converts every 8-bit float to a float; and floats to 8 bits: every upper half with lower halves that decide ties, and random ones.
void convert(const Float8& format, const reference::Shape& shape) {
  const auto bits_of = [](float value) { return std::isnan(value) ? 0x7fffffff : bits_of_float(value); };
  for (uint32_t code = 0; code < 256; ++code)
    for (uint32_t at = 0; at < 8; ++at) {
      const float is = format.wide((uint64_t)code << 8 * at | ~(0xffull << 8 * at), at), right = (float)reference::decode(code, shape);
      expect(bits_of(is) == bits_of(right), "code " + std::to_string(code) + " is " + std::to_string(is) + ", not " + std::to_string(right));
      if (std::isfinite(right)) expect(format.narrow(is) == code, "code " + std::to_string(code) + " does not come back");
    }
  const auto back = [&](uint32_t bits) {
    const float value = float_of_bits(bits);
    const uint32_t is = format.narrow(value), right = reference::encode(value, shape);
    expect(is == right, "the float of bits " + std::to_string(bits) + " is code " + std::to_string(is) + ", not " + std::to_string(right));
  };
  for (uint32_t upper = 0; upper < 1 << 16; ++upper)
    for (uint32_t lower : {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff}) back(upper << 16 | lower);
  for (uint64_t bits = world::seed % 4099; bits < 1ull << 32; bits += 4099) back((uint32_t)bits);
}
void float8() {
  convert(Float8::e4m3(), reference::e4m3_shape);
  convert(Float8::e5m2(), reference::e5m2_shape);
  // And some known results.
  const struct { float value; uint32_t e4m3, e5m2; } known[] = {
      {0.0f, 0, 0},        {-0.0f, 0x80, 0x80},   {1.0f, 0x38, 0x3c},       {-448.0f, 0xfe, 0xdf},  {449.0f, 0x7e, 0x5f},         {1e30f, 0x7e, 0x7b},
      {INFINITY, 0x7e, 0x7b}, {-INFINITY, 0xfe, 0xfb}, {57344.0f, 0x7e, 0x7b}, {0x1p-9f, 1, 0x18},     {0x1p-10f, 0, 0x14},          {0x1.8p-9f, 2, 0x1a},
      {0x1p-16f, 0, 1},    {0x1p-17f, 0, 0},      {0x1.8p-16f, 0, 2},       {NAN, 0x7f, 0x7f},      {1.0625f, 0x38, 0x3c},        {1.1875f, 0x3a, 0x3d},
  };
  for (const auto& one : known) {
    expect(Float8::e4m3().narrow(one.value) == one.e4m3, "e4m3 of " + std::to_string(one.value) + " is " + std::to_string(Float8::e4m3().narrow(one.value)));
    expect(Float8::e5m2().narrow(one.value) == one.e5m2, "e5m2 of " + std::to_string(one.value) + " is " + std::to_string(Float8::e5m2().narrow(one.value)));
  }
}

// --- the same bits for every size -----------------------------------------------------------------------------------------------
//
// An element's result depends on the ranks' elements alone. Reduced by itself, or in any slice, at any offset and alignment, by any kind, way and
// kernel, alone, in a batch or uneven, it has the same bits. Each element is compared with its earlier result, not with a reference.

constexpr uint32_t rounding_types[] = {reference::half, reference::single, reference::wide, reference::brain, reference::e4m3, reference::e5m2};
constexpr Kind reductions[] = {collective::all_reduce, collective::reduce, collective::reduce_scatter};

// A call on the pool's elements, `span` of them or a few less.
Call on_pool(host::Random& random, world::Pool& pool, const Call& like, Kind kind, const Choice& choice, const Options& o, uint64_t span) {
  Call call = any_call(random, kind, choice, o.ranks, 0);
  call.type = like.type;
  call.by = like.by;
  call.scalars = like.scalars;
  call.values = reference::spread;
  call.pool = &pool;
  const uint64_t width = reference::element_bytes[call.type], most = std::min(bytes_max(o, choice) / width, span);
  call.count = kind == collective::reduce_scatter ? std::max<uint64_t>(1, most / o.ranks) : most;
  const uint64_t used = kind == collective::reduce_scatter ? call.count * o.ranks : call.count;
  call.first = random.below(pool.elements - used + 1);
  return call;
}
std::vector<Call> calls_on_pool(host::Random& random, world::Pool& pool, uint32_t type, uint32_t by, const Options& o) {
  Call like;
  like.type = type;
  like.by = by;
  like.scalars = random.next();
  std::vector<std::vector<Call>> parts;  // of calls that stay together
  for (Kind kind : reductions)
    for (const Choice& choice : choices_of(kind, o.ranks)) {
      parts.push_back({on_pool(random, pool, like, kind, choice, o, 1)});
      // Calls for one batch kernel, if there is one.
      std::vector<Call> several;
      for (uint64_t left = 1 + random.below(3); left; --left) {
        several.push_back(on_pool(random, pool, like, kind, choice, o, 1 + random.below(pool.elements)));
        several.back().any_kernel = several.front().any_kernel;
      }
      parts.push_back(several);
    }
  for (int i = 0; i < 2; ++i) {
    Call call = on_pool(random, pool, like, collective::reduce_scatter, {collective::ll128, o.ranks <= 4 && random.below(2) ? 4u : 2u}, o, 1);
    call.in_place = false;
    std::vector<uint64_t> sizes(o.ranks);
    for (uint64_t& size : sizes) size = random.below(3) == 0 ? 0 : random.below(pool.elements / o.ranks);
    call.matrix.assign(o.ranks, sizes);
    uint64_t all = 0;
    for (uint64_t size : sizes) all += size;
    call.first = random.below(pool.elements - all + 1);
    parts.push_back({call});
  }
  shuffle(parts, random);
  std::vector<Call> calls;
  for (const std::vector<Call>& part : parts) calls.insert(calls.end(), part.begin(), part.end());
  return calls;
}

void same_bits() {
  host::Random random{world::seed};
  uint64_t compared = 0;
  for (uint32_t ranks : {2, 3, 4, 5, 8}) {
    Options o;
    o.ranks = ranks;
    o.channels = 8;
    std::deque<world::Pool> pools;
    std::vector<Call> calls;
    for (uint32_t type : rounding_types)
      for (uint32_t by = 0; by < reference::operations; ++by) {
        world::Pool& pool = pools.emplace_back(by == reference::sum ? 4000 : 600);
        for (const Call& call : calls_on_pool(random, pool, type, by, o)) calls.push_back(call);
      }
    World world(o);
    How how;
    how.batches_of = 4;
    how.batches_full = true;
    world::run(world, calls, how);
    for (const world::Pool& pool : pools) {
      expect(pool.unlike == 0, pool.first_unlike);
      compared += pool.compared;
    }
  }
  std::printf("%llu elements compared\n", (unsigned long long)compared);
  expect(compared > 1000000, "too few elements met again");
}

// Checks that the same calls would find a fold in the opposite order.
void other_folds_are_found() {
  host::Random random{world::seed};
  for (uint32_t ranks : {3, 4, 5, 8})
    for (uint32_t type : rounding_types)
      for (uint32_t by : {reference::sum, reference::average}) {
        if (type == reference::e4m3) continue;  // its sums are exact in a float, so the order changes nothing
        Options o;
        o.ranks = ranks;
        world::Pool pool(1200);
        std::vector<Call> calls = calls_on_pool(random, pool, type, by, o);
        Call large = on_pool(random, pool, calls[0], collective::all_reduce, {collective::two_phases, 2}, o, pool.elements);
        calls.push_back(large);
        for (Call& call : calls)
          if (call.choice.family == collective::two_phases && call.count >= 300) call.folds_down = call.any_kernel = true;
        World world(o);
        How how;
        how.batches_of = 4;
        world::run(world, calls, how);
        expect(pool.unlike > 0, large.name(ranks) + ": folded from the last rank down, and nobody saw it");
      }
}

// Batches over LL and LL128, with more packets than channels and rings hold, of kinds in turn, between single calls of every wire.
void batches() {
  host::Random random{world::seed};
  for (int worlds = 0; worlds < (HOST_TSAN ? 2 : 12); ++worlds) {
    Options o;
    o.ranks = HOST_TSAN ? 2 + (uint32_t)random.below(2) : (uint32_t[]){2, 3, 4, 5, 8}[random.below(5)];
    o.channels = 2u << random.below(4);
    o.slots = 2u << random.below(4);
    o.first_tag = random.below(2) ? (1ull << 32) - 1 - random.below(300) : 1 + random.next() / 2;
    o.first_count = random.below(2) ? (1ull << 32) - 1 - random.below(100) : 0;
    World world(o);
    std::vector<Call> calls;
    const Kind copies[] = {collective::all_gather, collective::all_to_all}, reductions[] = {collective::all_reduce, collective::reduce_scatter};
    while (calls.size() < (HOST_TSAN ? 20 : 150)) {
      if (random.below(6) == 0) calls.push_back(any_call(random, o));
      const bool reduces = random.below(3) != 0, by_ll = random.below(2), in_shares = reduces && !by_ll && random.below(2);
      const Choice ll128 = {collective::ll128, o.ranks <= 4 ? 4u : 2u}, shares = {collective::two_phases, 2}, ll = {collective::ll, 2};
      const Choice choice = by_ll ? ll : in_shares ? shares : ll128;
      const Call like = any_call(random, reduces ? collective::all_reduce : collective::all_gather, choice, o.ranks, 0);
      const uint64_t most = by_ll ? bytes_max(o, choice) : ring_bytes(o, choice);
      for (uint64_t left = 1 + random.below(random.below(4) ? 20 : 90); left; --left) {
        const uint64_t which = by_ll ? random.below(2) : reduces && !in_shares;
        Call call = any_call(random, (reduces ? reductions : copies)[which], choice, o.ranks, 0);
        if (reduces) call.type = like.type, call.by = like.by, call.any_kernel = like.any_kernel;
        call.count = (random.below(4) ? random.below(600) : random.below(most + 1)) % (most + 1) / reference::element_bytes[call.type];
        call.values = reduces && random.below(8) == 0 ? reference::special : reference::usual;
        calls.push_back(call);
      }
    }
    How how;
    how.batches_of = 70;
    how.batches_full = random.below(2);
    how.late_microseconds = random.below(2) ? 300 : 0;
    how.grid_by_rank = random.below(2);
    world::run(world, calls, how);
  }
}

// Random calls one after the other, in random geometries; each rank has another grid and delay each time.
void mixed() {
  host::Random random{world::seed};
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(8);
  int worlds = 0;
  do {
    Options o;
    o.ranks = HOST_TSAN ? 2 + (uint32_t)random.below(2) : (uint32_t[]){2, 3, 4, 5, 8}[random.below(5)];
    o.channels = 2u << random.below(3);
    o.slots = 2u << random.below(3);
    o.one_shot_channels = 1 + (uint32_t)random.below(7);
    o.one_shot_slots = 1 + (uint32_t)random.below(20);
    o.first_tag = 1 + random.next() / 2;
    World world(o);
    std::vector<Call> calls;
    for (int i = 0; i < (HOST_TSAN ? 6 : 60); ++i) calls.push_back(any_call(random, o));
    How how;
    how.late_microseconds = random.below(2) ? 300 : 0;
    how.slow_in_turn = random.below(2);
    world::run(world, calls, how);
    ++worlds;
  } while (std::chrono::steady_clock::now() < end);
  std::printf("%d communicators\n", worlds);
}

// Broadcasts from a fast root and reductions to a slow one, far more than rings hold, between calls that go both ways; the same
// with the others slow. Nothing but credit holds a sender back.
void one_way_lapped() {
  host::Random random{world::seed};
  for (uint32_t slots : {2, 4, 8})
    for (bool root_slow : {true, false}) {
      Options o;
      o.ranks = HOST_TSAN ? 2 : 3;
      o.slots = slots;
      World world(o);
      std::vector<Call> calls;
      for (int i = 0; i < (HOST_TSAN ? 4 : 40); ++i) {
        const Choice choice = one_of(random, choices_of(root_slow ? collective::reduce : collective::broadcast, o.ranks));
        for (uint64_t k = random.below(6); k < 6; ++k) {
          Call call = any_call(random, root_slow ? collective::reduce : collective::broadcast, choice, o.ranks, random.below(ring_bytes(o, choice)));
          call.root = 0;
          calls.push_back(call);
        }
        // Then a call both ways on the same wire, small enough to need no credit, only proof.
        const Choice both_ways = choice.family == collective::two_phases ? Choice{collective::ll128, 2} : choice;
        if (random.below(2)) calls.push_back(any_call(random, collective::all_gather, both_ways, o.ranks, random.below(ring_bytes(o, both_ways) / 2)));
        // And a call over LL, which shares nothing with them.
        if (random.below(2)) calls.push_back(any_call(random, collective::all_gather, {collective::ll, 2}, o.ranks, random.below(1000)));
      }
      How how;
      how.slow_rank = root_slow ? 0 : 1 + (uint32_t)random.below(o.ranks - 1);
      how.slow_microseconds = 300;
      world::run(world, calls, how);
    }
}

// A call in which every connection has a size of its own, some zero, as in all-gather-v and reduce-scatter-v, or less regular.
Call any_uneven_call(host::Random& random, const Options& o) {
  constexpr Kind own[] = {collective::all_gather, collective::reduce_scatter, collective::all_to_all};
  const Choice choice{collective::ll128, o.ranks <= 4 && random.below(2) ? 4u : 2u};
  Call call = any_call(random, own[random.below(3)], choice, o.ranks, 0);
  call.in_place = false;
  call.matrix.assign(o.ranks, std::vector<uint64_t>(o.ranks));
  const auto size = [&] { return random.below(3) == 0 ? 0 : any_bytes(random, o, choice, 2) / reference::element_bytes[call.type]; };
  for (uint32_t from = 0; from < o.ranks; ++from) {
    const uint64_t of_rank = size();
    for (uint32_t to = 0; to < o.ranks; ++to)
      call.matrix[from][to] = call.kind == collective::all_gather ? of_rank : call.kind == collective::reduce_scatter && from ? call.matrix[0][to] : size();
  }
  return call;
}

void uneven() {
  host::Random random{world::seed};
  for (uint32_t ranks : {2, 3, 5, 8}) {
    if (HOST_TSAN && ranks > 3) continue;
    Options o;
    o.ranks = ranks;
    o.slots = 2u << random.below(3);
    o.first_tag = random.below(2) ? (1ull << 32) - 1 - random.below(300) : 1;
    o.first_count = random.below(2) ? (1ull << 32) - 1 - random.below(100) : 0;
    World world(o);
    std::vector<Call> calls;
    for (int i = 0; i < (HOST_TSAN ? 6 : 50); ++i) calls.push_back(any_uneven_call(random, o));
    How how;
    how.late_microseconds = 300;
    world::run(world, calls, how);
  }
}

// Calls of all kinds over one geometry.
void some_calls(const Options& o, int count, const How& how = {}, reference::Values values = reference::usual) {
  host::Random random{world::seed ^ o.first_tag};
  World world(o);
  std::vector<Call> calls;
  for (int i = 0; i < count; ++i) {
    calls.push_back(any_call(random, o, 3));
    if (values != reference::like_tags) continue;
    // Not over Simple: its packets lie in the slots of LL128 lines, and payload made to look like tags would be taken for them (README.md).
    while (collective::is_simple(calls.back().choice.family)) calls.back() = any_call(random, o, 3);
    calls.back().type = reference::uint64;
    calls.back().count /= 8;
    calls.back().values = values;
  }
  world::run(world, calls, how);
}

// Rings of two packets: every second packet waits.
void ring_of_two() {
  for (uint32_t ranks : {2, 3, 4}) {
    Options o;
    o.ranks = ranks;
    o.channels = 2;
    o.slots = 2;
    How how;
    how.late_microseconds = 200;
    some_calls(o, 60 / scale, how);
  }
}

// Tags whose low 32 bits wrap during the run, and high tags.
void tags() {
  for (uint64_t first_tag : {(1ull << 32) - 12, (1ull << 31) - 12, (5ull << 32) - 40, (1ull << 63) - 12, 0ull - (1ull << 20)}) {
    Options o;
    o.ranks = 3;
    o.first_tag = first_tag;
    some_calls(o, 60);
  }
}

// Channels that have carried nearly 2^32 packets.
void counts_32() {
  Options o;
  o.ranks = 3;
  o.first_count = (1ull << 32) - 9;
  some_calls(o, 150 / scale);
}

// Data that equal future or past tags must not be taken for tags.
void payload_like_tags() {
  for (uint32_t slots : {2, 4}) {
    Options o;
    o.ranks = 3;
    o.slots = slots;
    some_calls(o, 120, {}, reference::like_tags);
  }
}

// Each rank has a grid of its own, rank 0 a single warp for each role: channels are served in order, so all come to the same one.
void grids() {
  for (uint32_t ranks : {2, 4, 8}) {
    if (HOST_TSAN && ranks > 2) continue;
    Options o;
    o.ranks = ranks;
    o.channels = 8;
    o.slots = 2;
    How how;
    how.grid_by_rank = true;
    how.blocks_max = 4;
    how.role_warps_max = 3;
    how.late_microseconds = 100;
    some_calls(o, 80 / scale, how);
  }
}

// Every rank in turn is much later than the others, which go as far ahead as rings let them.
void ranks_ahead() {
  for (uint32_t ranks : {2, 4, 5}) {
    Options o;
    o.ranks = ranks;
    How how;
    how.slow_in_turn = true;
    how.slow_microseconds = 6000;
    some_calls(o, 120, how);
  }
}

// Calls in one shot alone, of other kinds and sizes launch by launch, so that a channel has none, one or many packets, and a place the lines of the same
// launches on all ranks, whatever they were. Every rank in turn is late, so that the others go as far ahead as they can. Counts and tags pass 2^32.
void one_shot() {
  host::Random random{world::seed};
  for (uint32_t ranks : {2, 3, 4, 8}) {
    if (HOST_TSAN && ranks > 3) continue;
    Options o;
    o.ranks = ranks;
    o.one_shot_channels = 1 + (uint32_t)random.below(6);
    o.one_shot_slots = 1 + (uint32_t)random.below(25);
    o.first_tag = random.below(2) ? (1ull << 32) - 1 - random.below(100) : (1ull << 63) - 12;
    o.first_count = random.below(2) ? (1ull << 32) - 1 - random.below(60) : random.below(2);
    World world(o);
    std::vector<Call> calls;
    for (int i = 0; i < (HOST_TSAN ? 16 : 60); ++i) {
      const Kind kind = (Kind[]){collective::all_reduce, collective::all_gather, collective::reduce_scatter}[random.below(3)];
      const Choice choice{kind == collective::all_reduce ? collective::one_shot : collective::one_shot_parts, ranks <= 4 ? 4u : 2u};
      const uint64_t most = bytes_max(o, choice), packets = 1 + random.below(o.one_shot_slots);
      const uint64_t bytes[] = {random.below(20), packets * packet_bytes(choice), packets * packet_bytes(choice) - 1 - random.below(40), random.below(most + 1), most};
      calls.push_back(any_call(random, kind, choice, ranks, bytes[random.below(5)]));
      // Nothing that is moved here looks like a tag of this communicator by chance: it is made so.
      if (random.below(4) == 0) calls.back().type = reference::uint64, calls.back().count = bytes[3] / 8, calls.back().values = reference::like_tags;
    }
    How how;
    how.slow_in_turn = random.below(2);
    how.slow_microseconds = 1000;
    how.late_microseconds = 100;
    world::run(world, calls, how);
  }
}

// One rank never comes: the kernels of the others leave at the abort word, or when the host asks who waits, and report for which peer, channel and wire they waited.
void abort_in_the_middle() {
  struct Case {
    Kind kind;
    Choice choice;
    uint32_t waited_for;
    uint64_t sequence;
    uint32_t batch = 1;  // the rank that never comes makes the first of so many
    uint32_t root = 0;
    uint32_t word = WINDLASS_CONTROL_ABORT;
  };
  const Case cases[] = {
      {collective::all_gather, {collective::ll, 2}, WINDLASS_WAITED_LL_DATA, 0},
      {collective::all_reduce, {collective::ll, 2}, WINDLASS_WAITED_LL_DATA, 1, 3},
      {collective::all_reduce, {collective::two_phases, 2}, WINDLASS_WAITED_LL128_DATA, 3, 3},
      {collective::all_gather, {collective::ll128, 4}, WINDLASS_WAITED_LL128_DATA, 8, 3},
      {collective::broadcast, {collective::ll128, 2}, WINDLASS_WAITED_LL128_CREDIT, 4},
      {collective::all_to_all, {collective::ll128, 2}, WINDLASS_WAITED_LL128_DATA, 0},
      {collective::broadcast, {collective::ll128, 4}, WINDLASS_WAITED_LL128_CREDIT, 4},
      {collective::all_reduce, {collective::two_phases, 2}, WINDLASS_WAITED_LL128_DATA, 0},
      // The root waits for results of all ranks, which themselves wait for the missing one.
      {collective::reduce, {collective::two_phases, 2}, WINDLASS_WAITED_LL128_DATA, 0, 1, 2},
      {collective::all_reduce, {collective::simple_two_phases, 4}, WINDLASS_WAITED_LL128_DATA, 0},
      {collective::all_reduce, {collective::one_shot, 4}, WINDLASS_WAITED_ONE_SHOT_DATA, 0},
      {collective::all_reduce, {collective::one_shot, 4}, WINDLASS_WAITED_ONE_SHOT_DATA, 0, 1, 0, WINDLASS_CONTROL_ASK},
      {collective::all_gather, {collective::one_shot_parts, 4}, WINDLASS_WAITED_ONE_SHOT_DATA, 0},
      {collective::reduce_scatter, {collective::one_shot_parts, 4}, WINDLASS_WAITED_ONE_SHOT_DATA, 0, 1, 0, WINDLASS_CONTROL_ASK},
  };
  for (const Case& one : cases) {
    Options o;
    o.ranks = 3;
    if (one.batch > 1) o.channels = 1;  // so that the second call waits behind the first
    World world(o);
    world.ends_when_asked = true;
    Call call;
    call.kind = one.kind;
    call.choice = one.choice;
    call.count = std::min(2 * ring_bytes(o, one.choice), bytes_max(o, one.choice)) / 4;
    call.root = one.root;
    // All ranks complete a first call, also the one that then never comes.
    Call before = call;
    before.kind = collective::all_gather;
    before.choice = {one.choice.family == collective::ll ? collective::ll128 : collective::ll, 2};
    before.count = 100;
    std::vector<std::thread> ranks;
    std::atomic<uint32_t> ended{0};
    const uint32_t missing = 2;
    // One warp of each role, so that all are at channel 0. With other grids a report may rightly name ranks that wait on an earlier channel.
    How how;
    how.blocks_max = how.role_warps_max = 1;
    how.batches_of = one.batch;
    how.batches_full = true;
    std::vector<Call> made{before}, all{before};
    for (uint32_t i = 0; i < one.batch; ++i) {
      if (i) made.push_back(call);
      all.push_back(call);
    }
    made.resize(std::min<size_t>(made.size(), 2));
    for (uint32_t rank = 0; rank < o.ranks; ++rank)
      ranks.emplace_back([&, rank] {
        world::Rank{world, rank, {world::seed + rank}, {}, {}}.run(rank == missing ? made : all, how);
        ++ended;
      });
    // All ranks have launched all their kernels (two each, the missing rank perhaps one), and have had time to reach their waits.
    const uint32_t launches = 2 * o.ranks - (made.size() == 1);
    while (ended < 1 || world.begun < launches) usleep(1000);
    usleep(100000);
    __atomic_store_n(&world.control, one.word, __ATOMIC_RELEASE);
    const auto begin = std::chrono::steady_clock::now();
    for (std::thread& rank : ranks) rank.join();
    expect(std::chrono::steady_clock::now() - begin < std::chrono::seconds(20), "the kernels took long to leave");
    const WindlassP2pReport& report = world.reports[0];
    const std::string name = call.name(o.ranks);
    expect(report.rank == 0 && report.claimed >= 1, name + ": no report");
    bool found = false;
    for (uint32_t i = 0; i < std::min<uint32_t>(report.claimed, WINDLASS_REPORT_ENTRIES); ++i) {
      const WindlassP2pReportEntry& entry = report.entries[i];
      // Warps of another role may wait for a rank that waits itself.
      if (entry.waited_for != one.waited_for) continue;
      expect(entry.peer == missing, name + ": the report names rank " + std::to_string(entry.peer) + ", which is not missing");
      expect(entry.sequence == one.sequence, name + ": the report names packet " + std::to_string(entry.sequence));
      expect(entry.channel == 0, name + ": the report names channel " + std::to_string(entry.channel));
      found = true;
    }
    expect(found, name + ": the report does not say who is missing");
  }
}

// The host asks who waits, and a warp hears it at the very poll that finds its packet. It waits for nobody, so it goes on.
void asked_as_data_come() {
  Options o;
  o.channels = 1;
  World world(o);
  Call call;
  call.kind = collective::reduce_scatter;
  call.choice = {collective::simple, 4};
  call.count = packet_bytes(call.choice) / 4;
  How how;
  how.blocks_max = how.role_warps_max = 1;
  std::atomic<bool> asks{false};
  how.turn = [&](uint32_t rank, size_t) {
    while (rank == 1 && !asks) usleep(100);
  };
  uint64_t& posted = world.channel_word(0, world.layout.ll128, 0, WINDLASS_CHANNEL_POSTED + 1);
  uint64_t& received = world.channel_word(1, world.layout.ll128, 0, WINDLASS_CHANNEL_RECEIVED);
  // Four lanes load the word in each round.
  uint32_t loads_before = 4 * (rounds_between_looks - 1);
  host::before_load = [&](uint64_t address) {
    if (address != world::address_of(&posted) || asks || loads_before--) return;
    asks = true;
    // Rank 1 has sent, and needs nothing any more: no other warp may answer.
    while (!__atomic_load_n(&posted, __ATOMIC_ACQUIRE) || !__atomic_load_n(&received, __ATOMIC_ACQUIRE)) usleep(100);
    __atomic_store_n(&world.control, (uint32_t)WINDLASS_CONTROL_ASK, __ATOMIC_RELEASE);
  };
  world::run(world, {call}, how);
  host::before_load = nullptr;
  expect(asks, "no warp waited for the packet");
  expect(!world.reports[0].claimed && !world.reports[1].claimed, "a warp reports, although none waits");
}

// The same for a warp that waits for room, of which four lanes load the credit. The lane that reports loads it last, and finds room; its twins do not.
void asked_as_room_comes() {
  Options o;
  o.channels = 1;
  World world(o);
  Call call;
  call.kind = collective::broadcast;
  call.choice = {collective::ll128, 2};
  call.count = o.slots * packet_bytes(call.choice) / 4;
  How how;
  how.blocks_max = how.role_warps_max = 1;
  std::atomic<bool> asks{false}, has_sent{false};
  // Rank 0 fills the ring by the first call and waits in the second one. No other warp may answer: rank 1 begins the second call when rank 0 has ended it.
  how.turn = [&](uint32_t rank, size_t launch) {
    if (rank == 0 && launch == 2) {
      __atomic_store_n(&world.control, (uint32_t)WINDLASS_CONTROL_RUN, __ATOMIC_RELEASE);
      has_sent = true;
    }
    while (rank == 1 && !(launch ? has_sent : asks)) usleep(100);
  };
  uint64_t& credit = world.channel_word(0, world.layout.ll128, 0, WINDLASS_CHANNEL_CREDIT + 1);
  uint64_t& received = world.channel_word(1, world.layout.ll128, 0, WINDLASS_CHANNEL_RECEIVED);
  // Four loads at the beginning of each call, and four in each round.
  uint32_t loads_before = 8 + 4 * (rounds_between_looks - 1);
  bool twin_has_loaded = false;
  host::before_load = [&](uint64_t address) {
    if (address != world::address_of(&credit) || asks) return;
    if (loads_before) {
      --loads_before;
      return;
    }
    if (lane_index() >= 8) {
      twin_has_loaded = true;
      return;
    }
    while (!twin_has_loaded) host::current->yield();
    asks = true;
    while (!__atomic_load_n(&received, __ATOMIC_ACQUIRE)) usleep(100);
    __atomic_store_n(&world.control, (uint32_t)WINDLASS_CONTROL_ASK, __ATOMIC_RELEASE);
  };
  world::run(world, {call, call, call}, how);
  host::before_load = nullptr;
  expect(asks, "no warp waited for room");
  expect(!world.reports[0].claimed && !world.reports[1].claimed, "a warp reports, although none waits");
}

// --- few resident blocks --------------------------------------------------------------------------------------------------------

Options of_few_blocks(host::Random& random, uint32_t ranks) {
  Options o;
  o.ranks = ranks;
  o.channels = 8u << random.below(2);
  o.slots = 2u << random.below(3);
  o.first_tag = 1 + random.next() / 2;
  return o;
}
// A call of each kind and way, of a size that uses all channels, and uneven calls.
std::vector<Call> of_each_way(host::Random& random, const Options& o) {
  std::vector<Call> calls;
  for (Kind kind : kinds)
    for (const Choice& choice : choices_of(kind, o.ranks)) {
      const uint64_t bytes = std::min(ring_bytes(o, choice) / 2 + random.below(ring_bytes(o, choice)), bytes_max(o, choice));
      calls.push_back(any_call(random, kind, choice, o.ranks, choice.family == collective::two_phases || choice.family == collective::simple_two_phases ? bytes * o.ranks : bytes));
    }
  for (int i = 0; i < 3; ++i) calls.push_back(any_uneven_call(random, o));
  shuffle(calls, random);
  if (HOST_TSAN) calls.resize(6);
  return calls;
}
How alike(host::Random& random, uint32_t blocks_max) {
  How how;
  how.grids_alike = true;
  how.blocks_max = blocks_max;
  how.late_microseconds = 200;
  how.batches_of = 1 + (uint32_t)random.below(2) * 9;
  return how;
}
// Under ThreadSanitizer a program may have some 250 warps.
uint32_t any_grid(host::Random& random) { return (uint32_t[]){2, 3, 6, 8, 8}[random.below(HOST_TSAN ? 2 : 5)]; }
uint32_t cluster_of(uint32_t blocks_max) { return blocks_max < 4 ? 1 : 4; }

// Each rank's GPU has room for another part of the grid, at least for one cluster; all ranks have a call's grid alike.
void few_blocks_resident() {
  host::Random random{world::seed};
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(4);
  int worlds = 0;
  do {
    const Options o = of_few_blocks(random, HOST_TSAN ? 2 + worlds % 2 : (uint32_t[]){2, 3, 4, 8}[worlds % 4]);
    const uint32_t grid = any_grid(random);
    residency::Gpus gpus(grid, cluster_of(grid), residency::any_slots(random, o.ranks, cluster_of(grid), grid));
    World world(o);
    world.gpus = &gpus;
    std::vector<Call> calls = of_each_way(random, o);
    // Small calls in a row, so that some are one kernel.
    const Choice small[] = {{collective::ll, 2}, {collective::ll128, o.ranks <= 4 ? 4u : 2u}, {collective::two_phases, 2}};
    for (const Choice& choice : small) {
      const Kind kind = choice.family == collective::ll128 ? collective::all_gather : collective::all_reduce;
      const Call like = any_call(random, kind, choice, o.ranks, 0);
      for (int i = 0; i < (HOST_TSAN ? 3 : 8); ++i) {
        calls.push_back(like);
        calls.back().count = random.below(bytes_max(o, choice) < 6000 ? bytes_max(o, choice) : 6000) / reference::element_bytes[like.type];
      }
    }
    world::run(world, calls, alike(random, grid));
    ++worlds;
  } while (std::chrono::steady_clock::now() < end);
  std::printf("%d communicators\n", worlds);
}

// Several communicators on the same GPUs, whose kernels come in another order on some ranks: resident kernels wait for a peer's
// kernel that has no room yet.
void communicators_share_gpus() {
  host::Random random{world::seed};
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(4);
  int worlds_made = 0;
  do {
    const uint32_t ranks = HOST_TSAN ? 2 : (uint32_t[]){2, 3, 4, 8}[random.below(4)], grid = any_grid(random), cluster = cluster_of(grid);
    residency::Gpus gpus(grid, cluster, residency::any_slots(random, ranks, grid + cluster, 2 * grid + cluster));
    residency::Turns turns(gpus, HOST_TSAN ? 3 : 5, random);
    std::deque<World> worlds;
    std::deque<How> hows;
    std::deque<std::vector<Call>> calls;
    std::vector<world::Run> runs;
    for (uint32_t i = 0; i < turns.communicators(); ++i) {
      World& world = worlds.emplace_back(of_few_blocks(random, ranks));
      world.gpus = &gpus;
      How& how = hows.emplace_back(alike(random, grid));
      how.batches_of = 1;  // so that each has as many kernels
      how.turn = [&world, &turns, i](uint32_t rank, size_t launch) { turns.wait(rank, i, launch, [&world] { return world.aborted(); }); };
      calls.push_back(of_each_way(random, world.options));
      calls.back().resize(HOST_TSAN ? 4 : 10);
      runs.push_back({world, calls.back(), how});
    }
    world::run_together(runs);
    worlds_made += (int)runs.size();
  } while (std::chrono::steady_clock::now() < end);
  std::printf("%d communicators\n", worlds_made);
}

// Checks the tests of few blocks: with unlike grids, each partly resident, ranks wait for each other's next blocks, and the hang is found.
void unlike_grids_hang() {
  Options o;
  o.channels = 16;
  o.often_fewer_channels = false;  // so that all blocks have something to do
  residency::Gpus gpus(12, 4, {4, 4});
  World world(o);
  world.gpus = &gpus;
  Call call;
  call.kind = collective::all_gather;
  call.choice = {collective::ll128, 2};
  call.type = reference::uint8;
  call.count = o.channels * packet_bytes(call.choice);
  const std::vector<Call> calls = {call};
  How how;
  how.blocks_of_rank = {12, 8};
  expect(!world::all_end({{world, calls, how}}, std::chrono::seconds(1)), "unlike grids of which four blocks are resident went through");
  expect(world.reports[0].claimed && world.reports[1].claimed, "nobody says what he waited for");
}

const struct {
  const char* name;
  void (*run)();
  uint32_t delay_rarity;
} scenarios[] = {
    {"exhaustive", exhaustive, 2000},
    {"sizes", sizes, 500},
    {"special_values", special_values, 2000},
    {"float8", float8, 2000},
    {"same_bits", same_bits, 2000},
    {"other_folds_are_found", other_folds_are_found, 2000},
    {"batches", batches, 2000},
    {"mixed", mixed, 200},
    {"one_way_lapped", one_way_lapped, 200},
    {"uneven", uneven, 200},
    {"ring_of_two", ring_of_two, 64},
    {"tags", tags, 200},
    {"counts_32", counts_32, 200},
    {"payload_like_tags", payload_like_tags, 200},
    {"grids", grids, 64},
    {"ranks_ahead", ranks_ahead, 200},
    {"one_shot", one_shot, 200},
    {"abort", abort_in_the_middle, 200},
    {"asked_as_data_come", asked_as_data_come, 0},
    {"asked_as_room_comes", asked_as_room_comes, 0},
    {"few_resident", few_blocks_resident, 500},
    {"shared_gpus", communicators_share_gpus, 500},
    {"unlike_grids_hang", unlike_grids_hang, 500},
};

}  // namespace

int main(int count, char** arguments) {
  const std::string name = count > 1 ? arguments[1] : "";
  world::seed = count > 2 ? std::strtoull(arguments[2], nullptr, 0) : (uint64_t)std::chrono::system_clock::now().time_since_epoch().count();
  all_of_each = count > 3 && std::string(arguments[3]) == "all";
  ranks_wanted = count > 4 ? (uint32_t)std::strtoul(arguments[4], nullptr, 0) : 0;
  for (const auto& scenario : scenarios) {
    if (name != scenario.name && name != "all") continue;
    std::printf("%s seed %llu\n", scenario.name, (unsigned long long)world::seed);
    std::fflush(stdout);
    alarm(residency::seconds_max);  // ends a hang that no abort ends; each run sets it again
    host::delay_rarity = scenario.delay_rarity;
    world::calls_made = world::bytes_moved = 0;
    const auto begin = std::chrono::steady_clock::now();
    scenario.run();
    std::printf("%s: %.2f s, %llu calls of a rank, %.1f MB\n", scenario.name, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(),
                (unsigned long long)world::calls_made, (double)world::bytes_moved / 1e6);
    std::fflush(stdout);
    if (name == scenario.name) return 0;
  }
  if (name == "list")
    for (const auto& scenario : scenarios) std::printf("%s\n", scenario.name);
  return name == "all" || name == "list" ? 0 : 2;
}

// The p2p transport on GPUs: verifies random groups bitwise, then times them against NCCL in the same run. One process a GPU,
// symmetric heaps mapped by CUDA IPC. The kernel is the committed one, as scripts/kernels --unpack writes it.
//
//   nvcc -arch=sm_90 -std=c++17 -O3 p2p.cu -o p2p -ldl -lpthread
//   p2p FOLDER_OF_UNPACKED [SECONDS_OF_VERIFICATION] [SEED]       NCCL_LIBRARY: path of libnccl.so.2
//
// Prints the result first, then tables; the same into $OUT/p2p.txt.
#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "../host/arrange.h"

// --- ranks, agreement, output --------------------------------------------------------------------------------------------
constexpr int ranks_max = 8;
struct Shared {
  std::atomic<int> arrived, generation, failed;
  cudaIpcMemHandle_t heaps[8][ranks_max];
  // Growth of the fourth communicator: [sender][receiver][wire]. Asked by the sender, told by the receiver's host to the sender's.
  std::atomic<uint32_t> asked[ranks_max][ranks_max][2], told[ranks_max][ranks_max][2];
  char nccl_id[128];
  double values[ranks_max];
  uint64_t counts[ranks_max];
};
static Shared* shared;
static int rank, ranks;
static FILE* file;
static std::atomic<uint64_t> beats{0};

static void say(const char* format, ...) {
  if (rank) return;
  va_list list;
  va_start(list, format);
  char line[4096];
  vsnprintf(line, sizeof line, format, list);
  va_end(list);
  fputs(line, stdout);
  fflush(stdout);
  if (file) fputs(line, file), fflush(file);
}
#define CU(call)                                                                                           \
  do {                                                                                                     \
    const auto error_ = (call);                                                                            \
    if ((int)error_) {                                                                                     \
      fprintf(stderr, "rank %d line %d: %s: error %d\n", rank, __LINE__, #call, (int)error_);              \
      shared->failed = 1;                                                                                  \
      _exit(1);                                                                                            \
    }                                                                                                      \
  } while (0)

static void barrier() {
  const int before = shared->generation;
  if (++shared->arrived == ranks) {
    shared->arrived = 0;
    ++shared->generation;
  } else {
    while (shared->generation == before) {
      if (shared->failed) _exit(1);
      usleep(1);
    }
  }
  ++beats;
}
static double greatest(double value) {
  shared->values[rank] = value;
  barrier();
  double all = 0;
  for (int r = 0; r < ranks; ++r) all = std::max(all, shared->values[r]);
  barrier();
  return all;
}
static uint64_t sum(uint64_t value) {
  shared->counts[rank] = value;
  barrier();
  uint64_t all = 0;
  for (int r = 0; r < ranks; ++r) all += shared->counts[r];
  barrier();
  return all;
}
struct Random {
  uint64_t state;
  uint64_t next() {
    uint64_t z = state += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
  }
  uint64_t below(uint64_t limit) { return next() % limit; }
};

// --- data ------------------------------------------------------------------------------------------------------------------
__device__ uint8_t expected_byte(uint64_t id, uint64_t index) {
  uint64_t z = (id << 36 ^ index / 8) * 0x9e3779b97f4a7c15ull;
  z = (z ^ z >> 29) * 0xbf58476d1ce4e5b9ull;
  return (uint8_t)(z >> (8 * (index % 8)));
}
constexpr int margin = 64;
constexpr uint8_t canary = 0xa5;
__global__ void fill(uint8_t* data, size_t bytes, uint64_t id) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < bytes; i += (size_t)gridDim.x * blockDim.x) data[i] = expected_byte(id, i);
}
// Also the margins before and after.
struct Found {
  unsigned long long wrong, first;  // first: offset from the margin's begin << 16 | expected << 8 | found
};
__global__ void check(const uint8_t* data, size_t bytes, uint64_t id, unsigned long long* bad, Found* found) {
  unsigned long long wrong = 0;
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < bytes + 2 * margin; i += (size_t)gridDim.x * blockDim.x) {
    const bool inside = i >= margin && i < bytes + margin;
    const uint8_t here = data[(ptrdiff_t)i - margin], right = inside ? expected_byte(id, i - margin) : canary;
    if (here == right) continue;
    if (!wrong++) atomicMin(&found->first, (unsigned long long)i << 16 | (unsigned)right << 8 | here);
  }
  if (wrong) {
    atomicAdd(bad, wrong);
    atomicAdd(&found->wrong, wrong);
  }
}
__global__ void linger(long long nanoseconds) {
  long long start, now;
  asm volatile("mov.u64 %0,%globaltimer;" : "=l"(start));
  do asm volatile("mov.u64 %0,%globaltimer;" : "=l"(now));
  while (now - start < nanoseconds);
}
static int grid_for(size_t bytes) { return (int)std::min<size_t>(64, bytes / 4096 + 1); }

// --- the kernel ------------------------------------------------------------------------------------------------------------
// Of the driver, found at run time: nothing to link with.
static struct {
  decltype(&cuModuleLoadData) load;
  decltype(&cuModuleGetFunction) get_function;
  decltype(&cuFuncSetAttribute) set_attribute;
  decltype(&cuLaunchKernelEx) launch;
} driver;
static bool open_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) return false;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    return function != nullptr;
  };
  return find(driver.load, "cuModuleLoadData") && find(driver.get_function, "cuModuleGetFunction") &&
         find(driver.set_attribute, "cuFuncSetAttribute") && find(driver.launch, "cuLaunchKernelEx");
}

struct Kernel {
  CUfunction function;
  bool bulk_copies;
  const char* name;
};
static bool trimmed_parameters = true, trimmed_parameters_work = true;

static std::vector<char> contents(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  bytes.push_back(0);
  return bytes;
}
static bool load_kernel(const std::string& path, bool bulk_copies, Kernel& kernel) {
  CUmodule module;
  const auto bytes = contents(path);
  if (bytes.size() < 2 || driver.load(&module, bytes.data())) return false;
  CU(driver.get_function(&kernel.function, module, WINDLASS_P2P_KERNEL));
  CU(driver.set_attribute(kernel.function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 220 << 10));
  kernel.bulk_copies = bulk_copies;
  kernel.name = bulk_copies ? "bulk copies" : "ordinary stores";
  return true;
}

// --- a communicator --------------------------------------------------------------------------------------------------------
struct Config {
  uint32_t ll128_channels = 256, ll128_slots = 8, bulk_channels = 32, bulk_slots = 32, chunk = 16384, stages = 8;
};
struct Communicator {
  Config config;
  WindlassP2pGeometry geometry;
  std::vector<P2pPeer> peers;
  uint32_t* control;             // mapped host memory
  uint64_t control_on_device;
  WindlassP2pReport* report;    // device
  char *lists, *lists_on_device;  // for operations that do not fit: pinned, and a copy that the kernel reads
  size_t list_used = 0;
  char *heap = nullptr, *larger = nullptr;  // rings and words; the rings that these grow to
  size_t heap_bytes = 0, larger_bytes = 0;
  struct Grown {
    uint64_t send[2], receive[2];  // words for the larger rings, by wire
  };
  std::vector<Grown> grown;
  static constexpr uint32_t times_larger = 8;
  static constexpr size_t lists_bytes = 8 << 20;

  static size_t up(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }
  void make(int slot, const Config& c) {
    config = c;
    geometry = {(1ull << 32) - 40, 12ull << 20, c.ll128_channels, c.ll128_slots, c.bulk_channels, c.bulk_slots, c.chunk, (uint32_t)rank};
    const size_t line = up((size_t)c.ll128_channels * c.ll128_slots * WINDLASS_PACKET_SLOT_BYTES), bulk = up((size_t)c.bulk_channels * c.bulk_slots * c.chunk);
    const size_t posted = up(c.bulk_channels * WINDLASS_BULK_WORD_STRIDE), ll128_credit = up(c.ll128_channels * WINDLASS_LL128_WORD_STRIDE), bulk_credit = posted;
    const size_t progress = up((c.ll128_channels + c.bulk_channels) * WINDLASS_PROGRESS_STRIDE);
    const size_t ll128_from = up(c.ll128_channels * WINDLASS_LL128_FROM_STRIDE);
    const size_t pair = line + bulk + posted + ll128_credit + bulk_credit + 2 * progress + ll128_from;
    const size_t larger_pair = (line + bulk) * times_larger;
    heap_bytes = pair * ranks;
    larger_bytes = larger_pair * ranks;
    CU(cudaMalloc((void**)&heap, heap_bytes));
    CU(cudaMalloc((void**)&larger, larger_bytes));
    CU(cudaIpcGetMemHandle(&shared->heaps[slot][rank], heap));
    CU(cudaIpcGetMemHandle(&shared->heaps[slot + 4][rank], larger));
    CU(cudaHostAlloc((void**)&control, 4096, cudaHostAllocMapped));
    void* device;
    CU(cudaHostGetDevicePointer(&device, control, 0));
    control_on_device = reinterpret_cast<uint64_t>(device);
    renew();
    peers.resize(ranks);
    grown.resize(ranks);
    for (int peer = 0; peer < ranks; ++peer) {
      if (peer == rank) continue;
      char* theirs;
      CU(cudaIpcOpenMemHandle((void**)&theirs, shared->heaps[slot][peer], cudaIpcMemLazyEnablePeerAccess));
      // In every symmetric heap: the part for peer p holds the ring of what p sends here, and the credit for what is sent to p.
      char* mine = heap + pair * peer;
      theirs += pair * rank;
      const auto at = [&](char* base, size_t offset) { return reinterpret_cast<uint64_t>(base + offset); };
      const size_t o_posted = line + bulk, o_ll128_credit = o_posted + posted, o_bulk_credit = o_ll128_credit + ll128_credit, o_progress = o_bulk_credit + bulk_credit;
      WindlassP2pConnection send = {}, receive = {};
      send.ll128_ring = at(theirs, 0);
      send.bulk_ring = at(theirs, line);
      send.bulk_posted = at(theirs, o_posted);
      send.ll128_credit = at(mine, o_ll128_credit);
      send.bulk_credit = at(mine, o_bulk_credit);
      send.ll128_progress = at(mine, o_progress);
      send.bulk_progress = at(mine, o_progress + c.ll128_channels * WINDLASS_PROGRESS_STRIDE);
      receive.ll128_ring = at(mine, 0);
      receive.bulk_ring = at(mine, line);
      receive.bulk_posted = at(mine, o_posted);
      receive.ll128_credit = at(theirs, o_ll128_credit);
      receive.bulk_credit = at(theirs, o_bulk_credit);
      receive.ll128_progress = at(mine, o_progress + progress);
      receive.bulk_progress = at(mine, o_progress + progress + c.ll128_channels * WINDLASS_PROGRESS_STRIDE);
      send.ll128_from = at(theirs, o_progress + 2 * progress);
      receive.ll128_from = at(mine, o_progress + 2 * progress);
      send.growth = control_on_device + 1024 + peer * 16;
      receive.growth = control_on_device + 2048 + peer * 16;
      send.peer = receive.peer = (uint32_t)peer;
      peers[peer] = {send, receive};
      char* their_larger;
      CU(cudaIpcOpenMemHandle((void**)&their_larger, shared->heaps[slot + 4][peer], cudaIpcMemLazyEnablePeerAccess));
      const auto slots = [](uint32_t first) { return (uint64_t)__builtin_ctz(first * times_larger); };
      char *to = their_larger + larger_pair * rank, *from = larger + larger_pair * peer;
      grown[peer] = {{at(to, 0) | slots(c.ll128_slots), at(to, line * times_larger) | slots(c.bulk_slots)},
                     {at(from, 0) | slots(c.ll128_slots), at(from, line * times_larger) | slots(c.bulk_slots)}};
    }
    CU(cudaMalloc((void**)&report, sizeof *report));
    CU(cudaMemset(report, 0, sizeof *report));
    CU(cudaHostAlloc((void**)&lists, lists_bytes, cudaHostAllocDefault));
    CU(cudaMalloc((void**)&lists_on_device, lists_bytes));
    CU(cudaDeviceSynchronize());
    barrier();
  }

  // As at init; all ranks together, with nothing in flight.
  void renew() {
    CU(cudaDeviceSynchronize());
    barrier();
    CU(cudaMemset(heap, 0, heap_bytes));
    CU(cudaMemset(larger, 0, larger_bytes));
    CU(cudaDeviceSynchronize());
    memset(control, 0, 4096);
    for (int peer = 0; peer < ranks; ++peer)
      for (int wire = 0; wire < 2; ++wire) shared->asked[rank][peer][wire] = shared->told[rank][peer][wire] = 0;
    barrier();
  }
  bool has_request(int peer, int wire) { return *(volatile uint8_t*)((char*)control + 128 + wire * WINDLASS_GROWTH_REQUESTS_PER_WIRE + peer); }
  void tell_growth(bool receive, int peer, int wire) {
    uint64_t* const word = (uint64_t*)((char*)control + (receive ? 2048 : 1024) + peer * 16 + wire * 8);
    __atomic_store_n(word, receive ? grown[peer].receive[wire] : grown[peer].send[wire], __ATOMIC_RELEASE);
  }

  void group(const Kernel& kernel, const std::vector<P2pCall>& calls, cudaStream_t stream, uint64_t bulk_from = 0) {
    static thread_local std::vector<WindlassP2pOperation> operations;
    WindlassP2pLaunch launch;
    WindlassP2pGeometry own = geometry;
    if (bulk_from) own.bulk_from_bytes = bulk_from;
    const P2pLimits limits{kernel.bulk_copies, config.stages, 220u << 10};
    const P2pShape shape = p2p_arrange(calls.data(), calls.size(), peers.data(), peers.size(), own, limits, launch, operations);
    if (!shape.blocks) return;
    if (shape.blocks == p2p_refused) {
      fprintf(stderr, "too many channels for a block\n");
      shared->failed = 1;
      _exit(1);
    }
    launch.control = control_on_device;
    launch.growth_requests = control_on_device + 128;
    launch.report = reinterpret_cast<uint64_t>(report);
    if (shape.lists_operations) {
      const size_t bytes = operations.size() * sizeof(WindlassP2pOperation);
      if (list_used + bytes > lists_bytes) {
        CU(cudaDeviceSynchronize());
        list_used = 0;
      }
      memcpy(lists + list_used, operations.data(), bytes);
      CU(cudaMemcpyAsync(lists_on_device + list_used, lists + list_used, bytes, cudaMemcpyHostToDevice, stream));
      launch.operation_list = reinterpret_cast<uint64_t>(lists_on_device + list_used);
      list_used += bytes;
    }
    CUlaunchConfig config_ = {};
    config_.gridDimX = shape.blocks, config_.gridDimY = config_.gridDimZ = 1;
    config_.blockDimX = shape.threads, config_.blockDimY = config_.blockDimZ = 1;
    config_.sharedMemBytes = shape.shared_bytes;
    config_.hStream = stream;
    CUlaunchAttribute attributes[2];
    unsigned count = 0;
    if (shape.cluster > 1 && kernel.bulk_copies) {
      attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
      attributes[count].value.clusterDim = {shape.cluster, 1, 1};
      ++count;
    }
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN;
    attributes[count].value.memSyncDomain = CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE;
    ++count;
    config_.attrs = attributes;
    config_.numAttrs = count;
    if (trimmed_parameters) {
      size_t bytes = shape.parameter_bytes;
      void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &launch, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END};
      if (driver.launch(&config_, kernel.function, nullptr, extra) == CUDA_SUCCESS) return;
      fprintf(stderr, "rank %d: this driver wants all parameters\n", rank);
      trimmed_parameters = trimmed_parameters_work = false;
    }
    void* parameters[] = {&launch};
    CU(driver.launch(&config_, kernel.function, parameters, nullptr));
  }
};
static Communicator communicators[4];

static void print_report(Communicator& communicator, const char* name) {
  WindlassP2pReport report;
  cudaStream_t stream;
  if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) return;
  if (cudaMemcpyAsync(&report, communicator.report, sizeof report, cudaMemcpyDeviceToHost, stream) || cudaStreamSynchronize(stream)) return;
  for (uint32_t i = 0; i < std::min<uint32_t>(report.claimed, 6); ++i) {
    const auto& e = report.entries[i];
    fprintf(stderr, "rank %d %s: waited for %u of peer %u, channel %u, message %u, sequence %llu, seen %llu (%u entries)\n", rank, name, e.waited_for, e.peer, e.channel,
            e.operation, (unsigned long long)e.sequence, (unsigned long long)e.seen, report.claimed);
  }
}
// No beat for 25 s: a hang. Abort it, say where, leave.
static void watch() {
  uint64_t last = ~0ull;
  for (;;) {
    for (int i = 0; i < 250; ++i) {
      usleep(100000);
      if (shared->failed) break;
    }
    if (beats == last || shared->failed) break;
    last = beats;
  }
  shared->failed = 1;
  for (auto& c : communicators)
    if (c.control) *(volatile uint32_t*)c.control = WINDLASS_CONTROL_ABORT;
  sleep(1);
  fprintf(stderr, "rank %d: stuck after %llu beats\n", rank, (unsigned long long)beats.load());
  for (int i = 0; i < 4; ++i)
    if (communicators[i].control) print_report(communicators[i], i == 0 ? "first" : i == 1 ? "second" : i == 2 ? "third" : "growing");
  _exit(1);
}

// --- verification ------------------------------------------------------------------------------------------------------------
struct Message {
  int from, to;
  size_t bytes;
  uint32_t send_offset, receive_offset;
};
static uint8_t *input[2], *output[2];
static size_t space = 640ull << 20;
static unsigned long long* bad;
static uint64_t message_id = 1;

// What is known of a received message, for the tables of what went wrong.
struct Received {
  int from;
  size_t bytes;
  uint32_t send_offset, receive_offset;
  int where;
  uint64_t bulk_from;
  size_t in_group;
};
constexpr size_t received_max = 1 << 15;
static std::vector<Received> received;
static Found* found_on_device;

struct Placed {
  std::vector<P2pCall> calls;
  std::vector<std::pair<uint8_t*, std::pair<size_t, uint64_t>>> expected;
  size_t first_received = 0;
};
// Fills what this rank sends and clears what it receives; identical choices on all ranks.
static Placed place(const std::vector<Message>& messages, int where, cudaStream_t stream, uint64_t bulk_from = 0) {
  Placed placed;
  placed.first_received = received.size();
  size_t in = 0, out = 0;
  for (const Message& m : messages) {
    const uint64_t id = message_id++;
    if (m.from == rank) {
      uint8_t* at = input[where] + in + m.send_offset;
      in += (m.bytes + 16 + 255) / 256 * 256;
      if (m.bytes) fill<<<grid_for(m.bytes), 256, 0, stream>>>(at, m.bytes, id);
      placed.calls.push_back({reinterpret_cast<uint64_t>(at), m.bytes, (uint32_t)m.to, 0});
    }
    if (m.to == rank) {
      uint8_t* at = output[where] + out + margin + m.receive_offset;
      CU(cudaMemsetAsync(output[where] + out, canary, m.bytes + 2 * margin + 16, stream));
      out += (m.bytes + 2 * margin + 16 + 255) / 256 * 256;
      placed.calls.push_back({reinterpret_cast<uint64_t>(at), m.bytes, (uint32_t)m.from, 1});
      placed.expected.push_back({at, {m.bytes, id}});
      received.push_back({m.from, m.bytes, m.send_offset, m.receive_offset, where, bulk_from ? bulk_from : communicators[where].geometry.bulk_from_bytes, messages.size()});
    }
  }
  if (in > space || out > space) {
    fprintf(stderr, "messages of one group take too much\n");
    shared->failed = 1;
    _exit(1);
  }
  return placed;
}
static void check_placed(const Placed& placed, cudaStream_t stream) {
  size_t index = placed.first_received;
  for (const auto& e : placed.expected) {
    Found* const found = found_on_device + std::min(index++, received_max - 1);
    check<<<grid_for(e.second.first), 256, 0, stream>>>(e.first, e.second.first, e.second.second, bad, found);
  }
}

static size_t random_size(Random& random) {
  switch (random.below(16)) {
    case 0: return 0;
    case 1: return random.below(40);
    case 2: return (1 + random.below(40)) * 1920 + random.below(3) - 1;
    case 3: return (size_t)(random.below(1 << 20)) * 4;
    case 4: return random.below(24 << 20);
    case 5: return 16 * random.below(1 << 20);
    case 6:
    case 7:
    case 8: return random.below(1 << 20);
    default: return random.below(20000);
  }
}
static std::vector<Message> random_group(Random& random) {
  std::vector<Message> messages;
  const bool aligned = random.below(2);
  const auto add = [&](int from, int to) {
    const size_t bytes = random_size(random);
    messages.push_back({from, to, bytes, aligned ? 0 : (uint32_t)random.below(16), aligned ? 0 : (uint32_t)random.below(16)});
  };
  const int root = (int)random.below(ranks);
  switch (random.below(8)) {
    case 0: add(root, (root + 1 + (int)random.below(ranks - 1)) % ranks); break;
    case 1:
      for (int r = 0; r < ranks; ++r) add(r, (r + 1) % ranks);
      break;
    case 2:
      for (int r = 0; r < ranks; ++r)
        for (int p = 0; p < ranks; ++p) add(r, p);
      break;
    case 3:
      for (int r = 0; r < ranks; ++r) add(r, root);
      break;
    case 4:
      for (int r = 0; r < ranks; ++r) add(root, r);
      break;
    case 5:
      for (int r = 0; r < ranks; ++r) add(r, r ^ 1);
      break;
    default:
      for (int k = 0, n = 1 + (int)random.below(random.below(12) ? 12 : 100 * ranks); k < n; ++k) {
        const int from = (int)random.below(ranks);
        add(from, (from + (int)random.below(ranks)) % ranks);
      }
  }
  messages.erase(std::remove_if(messages.begin(), messages.end(), [&](const Message& m) { return m.from >= ranks || m.to >= ranks; }), messages.end());
  size_t total = 0;
  for (Message& m : messages) {
    total += m.bytes + 512;
    if (total > space - (64 << 20)) m.bytes = 0;
  }
  return messages;
}

static cudaStream_t streams[2];
// After a synchronisation: says which classes of messages were wrong and shows the first few. Then forgets them.
static int shown = 0;
static void classify(const char* name) {
  static std::vector<Found> found(received_max);
  const size_t count = std::min(received.size(), received_max);
  CU(cudaMemcpy(found.data(), found_on_device, count * sizeof(Found), cudaMemcpyDeviceToHost));
  size_t wrong = 0, bulk = 0, tail = 0, odd_source = 0, odd_target = 0, large_group = 0, second = 0;
  for (size_t i = 0; i < count; ++i) {
    if (!found[i].wrong) continue;
    const Received& r = received[i];
    ++wrong;
    bulk += r.bytes >= r.bulk_from;
    tail += r.bytes % 16 != 0;
    odd_source += r.send_offset != 0;
    odd_target += r.receive_offset != 0;
    large_group += r.in_group > 100;
    second += r.where;
    if (shown++ < 8)
      fprintf(stderr, "rank %d %s: from %d, %zu bytes, offsets %u and %u, %s, communicator %d, group of %zu: %llu wrong, first at %lld (%02llx, not %02llx)\n", rank, name, r.from, r.bytes,
              r.send_offset, r.receive_offset, r.bytes >= r.bulk_from ? "bulk" : "LL128", r.where, r.in_group, found[i].wrong, (long long)(found[i].first >> 16) - margin, found[i].first & 255,
              found[i].first >> 8 & 255);
  }
  if (wrong && shown < 40)
    fprintf(stderr, "rank %d %s: %zu of %zu messages wrong: bulk %zu, with a tail %zu, odd source %zu, odd target %zu, in groups over 100 %zu, second communicator %zu\n", rank, name, wrong, count,
            bulk, tail, odd_source, odd_target, large_group, second);
  received.clear();
  std::fill(found.begin(), found.end(), Found{0, ~0ull});
  CU(cudaMemcpy(found_on_device, found.data(), received_max * sizeof(Found), cudaMemcpyHostToDevice));
  CU(cudaDeviceSynchronize());
}

struct Verification {
  uint64_t operations = 0, groups = 0, bytes = 0;
};
static Verification verify(const Kernel& kernel, double seconds, uint64_t seed, int communicator_count) {
  Random random{seed}, local{seed * 31 + (uint64_t)rank};
  Verification verification;
  const auto begin = std::chrono::steady_clock::now();
  for (int round = 0;; ++round) {
    for (int k = 0; k < 20; ++k) {
      const int where = (int)random.below(communicator_count);
      const auto messages = random_group(random);
      const uint64_t bulk_choices[] = {0, 0, 300000, 4 << 20, 1ull << 40};
      const uint64_t bulk_from = bulk_choices[random.below(5)];
      const Placed placed = place(messages, where, streams[where], bulk_from);
      if (local.below(4) == 0) linger<<<1, 1, 0, streams[where]>>>((long long)local.below(60000));
      communicators[where].group(kernel, placed.calls, streams[where], bulk_from);
      check_placed(placed, streams[where]);
      verification.operations += placed.calls.size();
      ++verification.groups;
      for (const auto& e : placed.expected) verification.bytes += e.second.first;
    }
    CU(cudaDeviceSynchronize());
    classify(kernel.name);
    ++beats;
    const double now = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (greatest(now) > seconds) break;
  }
  verification.operations = sum(verification.operations);
  verification.bytes = sum(verification.bytes);
  return verification;
}
static uint64_t take_bad() {
  unsigned long long wrong = 0;
  CU(cudaMemcpy(&wrong, bad, 8, cudaMemcpyDeviceToHost));
  CU(cudaMemset(bad, 0, 8));
  CU(cudaDeviceSynchronize());
  return sum(wrong);
}

// A captured group replayed between eager ones.
static void verify_graph(const Kernel& kernel, uint64_t seed) {
  Random random{seed};
  std::vector<Message> messages;
  for (int r = 0; r < ranks; ++r)
    for (size_t bytes : {1000ul, 70000ul, 20ul << 20}) messages.push_back({r, (r + 1) % ranks, bytes, 0, (uint32_t)(bytes == 70000 ? 4 : 0)});
  const Placed first = place(messages, 0, streams[0]);
  cudaGraph_t graph;
  cudaGraphExec_t run;
  CU(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeThreadLocal));
  communicators[0].group(kernel, first.calls, streams[0]);
  CU(cudaStreamEndCapture(streams[0], &graph));
  CU(cudaGraphInstantiate(&run, graph, 0));
  for (int i = 0; i < 40; ++i) {
    const Placed again = place(messages, 0, streams[0]);  // same places, new contents
    CU(cudaGraphLaunch(run, streams[0]));
    check_placed(again, streams[0]);
    const Placed eager = place(random_group(random), 1, streams[0]);
    communicators[0].group(kernel, eager.calls, streams[0]);
    check_placed(eager, streams[0]);
  }
  CU(cudaDeviceSynchronize());
  classify("graph");
}

// This rank's host: grows rings of the fourth communicator while groups run, as the product's hosts would agree. At random
// times, or where a sender asks.
struct Growing {
  std::atomic<bool> ends{false};
  uint32_t grew = 0;
  std::thread thread;
  Growing(uint64_t seed, bool on_request) {
    thread = std::thread([this, seed, on_request] {
      Communicator& communicator = communicators[3];
      Random random{seed};
      std::vector<std::array<bool, 2>> sent(ranks), received(ranks);
      while (!ends) {
        usleep((useconds_t)(on_request ? 50 : random.below(3000)));
        const int peer = (int)random.below(ranks), wire = (int)random.below(2);
        if (peer == rank) continue;
        if (!sent[peer][wire] && (on_request ? communicator.has_request(peer, wire) : true)) shared->asked[rank][peer][wire] = 1;
        if (!received[peer][wire] && shared->asked[peer][rank][wire]) {
          communicator.tell_growth(true, peer, wire);
          received[peer][wire] = true;
          shared->told[peer][rank][wire] = 1;
        }
        if (!sent[peer][wire] && shared->told[rank][peer][wire]) {
          communicator.tell_growth(false, peer, wire);
          sent[peer][wire] = true;
          ++grew;
        }
      }
    });
  }
  uint32_t end() {
    ends = true;
    thread.join();
    return grew;
  }
};

// Random groups while rings grow at random times; again and again on a communicator as at init.
static Verification verify_growing(const Kernel& kernel, double seconds, uint64_t seed, uint64_t& grew) {
  Random random{seed}, local{seed * 37 + (uint64_t)rank};
  Verification verification;
  const auto begin = std::chrono::steady_clock::now();
  uint64_t own = 0;
  for (;;) {
    communicators[3].renew();
    Growing growing(local.next(), false);
    for (int k = 0; k < 30; ++k) {
      const auto messages = random_group(random);
      const uint64_t bulk_choices[] = {0, 300000, 300000, 4 << 20, 1ull << 40};
      const uint64_t bulk_from = bulk_choices[random.below(5)];
      if (k % 6 == 5) CU(cudaDeviceSynchronize());
      const Placed placed = place(messages, 0, streams[0], bulk_from);
      if (local.below(4) == 0) linger<<<1, 1, 0, streams[0]>>>((long long)local.below(60000));
      communicators[3].group(kernel, placed.calls, streams[0], bulk_from);
      check_placed(placed, streams[0]);
      verification.operations += placed.calls.size();
      ++verification.groups;
      for (const auto& e : placed.expected) verification.bytes += e.second.first;
    }
    CU(cudaDeviceSynchronize());
    barrier();
    own += growing.end();
    classify("growing");
    const double now = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (greatest(now) > seconds) break;
  }
  verification.operations = sum(verification.operations);
  verification.bytes = sum(verification.bytes);
  grew = sum(own);
  return verification;
}

// All ranks send more than the first ring takes, each to the next, and only then receive. Hangs unless rings grow.
static void verify_head_to_head(const Kernel& kernel) {
  for (int wire = 0; wire < 2; ++wire)
    for (int again = 0; again < 2; ++again) {
      communicators[3].renew();
      Growing growing((uint64_t)rank + 5, true);
      const uint64_t bulk_from = wire ? 1 << 20 : 1ull << 40;
      double first = 0, next = 0;
      for (int turn = 0; turn < 2; ++turn) {
        std::vector<Message> messages;
        for (int r = 0; r < ranks; ++r) messages.push_back({r, (r + 1) % ranks, (6 << 20) + 4099, 0, 0});
        const Placed placed = place(messages, 0, streams[0], bulk_from);
        CU(cudaStreamSynchronize(streams[0]));
        barrier();
        const auto begin = std::chrono::steady_clock::now();
        for (uint32_t receive = 0; receive < 2; ++receive)
          for (const P2pCall& call : placed.calls)
            if (call.receive == receive) communicators[3].group(kernel, {call}, streams[0], bulk_from);
        CU(cudaStreamSynchronize(streams[0]));
        (turn ? next : first) = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        check_placed(placed, streams[0]);
        CU(cudaDeviceSynchronize());
        barrier();
      }
      const uint64_t grew = sum(growing.end());
      classify("head to head");
      say("%s, head to head by %s: %.2f ms while rings grow (%llu grew), then %.2f ms\n", kernel.name, wire ? "chunks" : "LL128", greatest(first) * 1e3, (unsigned long long)grew, greatest(next) * 1e3);
    }
}

// Nobody sends: the kernel must leave soon after the abort word is set, and say what it waited for.
static void verify_abort(const Kernel& kernel) {
  Communicator& c = communicators[2];
  std::vector<P2pCall> calls;
  const int peer = (rank + 1) % ranks;
  calls.push_back({reinterpret_cast<uint64_t>(output[0]), 100000, (uint32_t)peer, 1});
  calls.push_back({reinterpret_cast<uint64_t>(input[0]), 64 << 20, (uint32_t)peer, 0});
  barrier();
  c.group(kernel, calls, streams[0]);
  usleep(50000);
  const auto before = std::chrono::steady_clock::now();
  *(volatile uint32_t*)c.control = WINDLASS_CONTROL_ABORT;
  CU(cudaStreamSynchronize(streams[0]));
  const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - before).count();
  WindlassP2pReport report;
  CU(cudaMemcpy(&report, c.report, sizeof report, cudaMemcpyDeviceToHost));
  bool right = report.claimed >= 1 && report.rank == (uint32_t)rank;
  for (uint32_t i = 0; i < std::min<uint32_t>(report.claimed, WINDLASS_REPORT_ENTRIES); ++i) {
    const auto& e = report.entries[i];
    right &= e.peer == (uint32_t)peer && ((e.waited_for == WINDLASS_WAITED_P2P_LL128_DATA && e.sequence == 0) || (e.waited_for == WINDLASS_WAITED_BULK_CREDIT && e.sequence == c.geometry.bulk_slots));
  }
  const double slowest = greatest(ms);
  say("abort: kernels left %.2f ms after the word was set; %s (%u entries on rank 0)\n", slowest, sum(!right) ? "REPORT WRONG" : "reports right", report.claimed);
}

// --- NCCL --------------------------------------------------------------------------------------------------------------------
struct NcclId {
  char bytes[128];
};
static struct {
  int (*get_version)(int*);
  int (*get_id)(NcclId*);
  int (*init)(void**, int, NcclId, int);
  int (*send)(const void*, size_t, int, int, void*, cudaStream_t);
  int (*receive)(void*, size_t, int, int, void*, cudaStream_t);
  int (*start)();
  int (*end)();
  void* communicators[2];
  bool there = false;
} nccl;
static void open_nccl() {
  const char* path = getenv("NCCL_LIBRARY");
  void* library = dlopen(path ? path : "libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    say("no NCCL: %s\n", dlerror());
    return;
  }
  const auto find = [&](auto& function, const char* name) { function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name)); };
  find(nccl.get_version, "ncclGetVersion");
  find(nccl.get_id, "ncclGetUniqueId");
  find(nccl.init, "ncclCommInitRank");
  find(nccl.send, "ncclSend");
  find(nccl.receive, "ncclRecv");
  find(nccl.start, "ncclGroupStart");
  find(nccl.end, "ncclGroupEnd");
  for (void*& communicator : nccl.communicators) {
    NcclId id;
    if (!rank) {
      CU(nccl.get_id(&id));
      memcpy(shared->nccl_id, &id, sizeof id);
    }
    barrier();
    memcpy(&id, shared->nccl_id, sizeof id);
    CU(nccl.init(&communicator, ranks, id, rank));
    barrier();
  }
  int version = 0;
  nccl.get_version(&version);
  nccl.there = true;
  say("NCCL %d\n", version);
}

// --- times -------------------------------------------------------------------------------------------------------------------
static double microseconds(const std::function<void()>& call, size_t bytes) {
  const int times = bytes > (16 << 20) ? 8 : 40, batches = 7;
  cudaEvent_t begin, end;
  CU(cudaEventCreate(&begin));
  CU(cudaEventCreate(&end));
  std::vector<double> all;
  for (int batch = -1; batch < batches; ++batch) {
    CU(cudaStreamSynchronize(streams[0]));
    barrier();
    // All launches are queued behind a pause, so that the host's own time shows only where it is the bound; then timed
    // in the steady state.
    for (int i = 0; i < 4; ++i) call();
    CU(cudaEventRecord(begin, streams[0]));
    for (int i = 0; i < times; ++i) call();
    CU(cudaEventRecord(end, streams[0]));
    CU(cudaEventSynchronize(end));
    float ms;
    CU(cudaEventElapsedTime(&ms, begin, end));
    if (batch >= 0) all.push_back(ms * 1000 / times);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(all.begin(), all.end());
  return greatest(all[all.size() / 2]);
}
static const char* size_name(size_t bytes) {
  static char name[32];
  if (bytes >= 1 << 20)
    snprintf(name, sizeof name, "%zu MB", bytes >> 20);
  else if (bytes >= 1024)
    snprintf(name, sizeof name, "%zu KB", bytes >> 10);
  else
    snprintf(name, sizeof name, "%zu B", bytes);
  return name;
}

static void times(const Kernel& kernel) {
  const uint64_t never = 1ull << 40;
  const int peer = rank ^ 1;
  const bool paired = peer < ranks;
  const size_t sizes[] = {8, 1024, 4096, 16384, 65536, 262144, 1 << 20, 4 << 20, 8 << 20, 16 << 20, 64 << 20, 256 << 20};
  const auto address = [](void* p) { return reinterpret_cast<uint64_t>(p); };
  for (int both = 0; both < 2; ++both) {
    say("\n%s, eager, us (LL128; bulk with 16 KB and 64 KB chunks; LL128 with 4 KB parameters)\n%10s %9s %9s %9s %9s %9s\n", both ? "both ways" : "one way", "bytes", "NCCL", "lines",
        "bulk16", "bulk64", "LL128 4K");
    for (size_t bytes : sizes) {
      const bool sends = paired && (both || !(rank & 1)), receives = paired && (both || (rank & 1));
      std::vector<P2pCall> calls;
      if (sends) calls.push_back({address(input[0]), bytes, (uint32_t)peer, 0});
      if (receives) calls.push_back({address(output[0]), bytes, (uint32_t)peer, 1});
      const double theirs = nccl.there ? microseconds(
                                             [&] {
                                               if (!paired) return;
                                               CU(nccl.start());
                                               if (receives) CU(nccl.receive(output[0], bytes, 0, peer, nccl.communicators[0], streams[0]));
                                               if (sends) CU(nccl.send(input[0], bytes, 0, peer, nccl.communicators[0], streams[0]));
                                               CU(nccl.end());
                                             },
                                             bytes)
                                       : 0;
      const double ll128 = microseconds([&] { communicators[0].group(kernel, calls, streams[0], never); }, bytes);
      double bulk[2] = {0, 0};
      if (bytes >= 1 << 20)
        for (int which = 0; which < 2; ++which) bulk[which] = microseconds([&] { communicators[which].group(kernel, calls, streams[0], 1); }, bytes);
      trimmed_parameters = false;
      const double full = bytes <= 65536 ? microseconds([&] { communicators[0].group(kernel, calls, streams[0], never); }, bytes) : 0;
      trimmed_parameters = trimmed_parameters_work;
      say("%10s %9.1f %9.1f %9.1f %9.1f %9.1f\n", size_name(bytes), theirs, ll128, bulk[0], bulk[1], full);
    }
  }
  say("\nall-to-all, eager, us; bytes: what a rank sends in all, own part included (own: with the own part in the kernel too)\n%10s %9s %9s %9s %9s %9s\n", "bytes", "NCCL", "lines",
      "bulk16", "bulk64", "own");
  for (size_t bytes : sizes) {
    const size_t part = bytes / ranks / 16 * 16;
    if (!part) continue;
    std::vector<P2pCall> calls;
    for (int p = 0; p < ranks; ++p) {
      if (p == rank) continue;
      calls.push_back({address(input[0] + p * part), part, (uint32_t)p, 0});
      calls.push_back({address(output[0] + p * part), part, (uint32_t)p, 1});
    }
    const double theirs = nccl.there ? microseconds(
                                           [&] {
                                             CU(nccl.start());
                                             for (int p = 0; p < ranks; ++p) {
                                               CU(nccl.send(input[0] + p * part, part, 0, p, nccl.communicators[0], streams[0]));
                                               CU(nccl.receive(output[0] + p * part, part, 0, p, nccl.communicators[0], streams[0]));
                                             }
                                             CU(nccl.end());
                                           },
                                           bytes)
                                     : 0;
    const double ll128 = microseconds([&] { communicators[0].group(kernel, calls, streams[0], never); }, bytes);
    double bulk[2] = {0, 0};
    if (bytes >= 4 << 20)
      for (int which = 0; which < 2; ++which) bulk[which] = microseconds([&] { communicators[which].group(kernel, calls, streams[0], 1); }, bytes);
    std::vector<P2pCall> all = calls;
    for (uint32_t receive = 0; receive < 2; ++receive) all.push_back({address((receive ? output : input)[0] + rank * part), part, (uint32_t)rank, receive});
    const double own = microseconds([&] { communicators[1].group(kernel, all, streams[0], bytes >= 64 << 20 ? 1 : never); }, bytes);
    say("%10s %9.1f %9.1f %9.1f %9.1f %9.1f\n", size_name(bytes), theirs, ll128, bulk[0], bulk[1], own);
  }
  say("\nboth ways with buffers at odd addresses (offset 8, 4, 1 bytes; LL128 to 4 MB, then ordinary stores in bulk channels), us\n");
  for (size_t bytes : {(size_t)65536, (size_t)4 << 20, (size_t)64 << 20}) {
    double odd[3];
    int i = 0;
    for (size_t offset : {8, 4, 1}) {
      std::vector<P2pCall> calls;
      if (paired) calls = {{address(input[0]) + offset, bytes, (uint32_t)peer, 0}, {address(output[0]) + offset, bytes, (uint32_t)peer, 1}};
      odd[i++] = microseconds([&] { communicators[0].group(kernel, calls, streams[0]); }, bytes);
    }
    say("%10s %9.1f %9.1f %9.1f\n", size_name(bytes), odd[0], odd[1], odd[2]);
  }
  if (ranks == 4) {
    // Two exchanges with different peers at once, each on its communicator and stream.
    const size_t bytes = 128 << 20;
    cudaEvent_t fork, join;
    CU(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    CU(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    const auto two = [&](const std::function<void(int, int, cudaStream_t)>& exchange) {
      return microseconds(
          [&] {
            CU(cudaEventRecord(fork, streams[0]));
            CU(cudaStreamWaitEvent(streams[1], fork, 0));
            exchange(0, rank ^ 1, streams[0]);
            exchange(1, rank ^ 2, streams[1]);
            CU(cudaEventRecord(join, streams[1]));
            CU(cudaStreamWaitEvent(streams[0], join, 0));
          },
          bytes);
    };
    const double theirs = nccl.there ? two([&](int which, int other, cudaStream_t stream) {
      CU(nccl.start());
      CU(nccl.receive(output[which], bytes, 0, other, nccl.communicators[which], stream));
      CU(nccl.send(input[which], bytes, 0, other, nccl.communicators[which], stream));
      CU(nccl.end());
    })
                                     : 0;
    double ours[2];
    for (int i = 0; i < 2; ++i)
      ours[i] = two([&](int which, int other, cudaStream_t stream) {
        communicators[which].group(kernel, {{address(input[which]), bytes, (uint32_t)other, 0}, {address(output[which]), bytes, (uint32_t)other, 1}}, stream, i == 1 ? never : 1);
      });
    say("\ntwo 128 MB exchanges with different peers at once, two communicators: NCCL %.0f us; bulk %.0f, LL128 %.0f\n", theirs, ours[0], ours[1]);
  }
  // What the host pays for a call.
  std::vector<P2pCall> calls;
  if (paired) calls = {{address(input[0]), 8, (uint32_t)peer, 0}, {address(output[0]), 8, (uint32_t)peer, 1}};
  CU(cudaDeviceSynchronize());
  barrier();
  const auto before = std::chrono::steady_clock::now();
  for (int i = 0; i < 300; ++i) communicators[0].group(kernel, calls, streams[0]);
  const double host = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - before).count() / 300;
  CU(cudaDeviceSynchronize());
  say("host time of one group (arrange and launch): %.2f us\n", greatest(host));
}

int main(int count, char** arguments) {
  const std::string folder = count > 1 ? arguments[1] : "build/kernels";
  const double seconds = count > 2 ? atof(arguments[2]) : 25;
  const uint64_t seed = count > 3 ? strtoull(arguments[3], nullptr, 0) : (uint64_t)time(nullptr);
  shared = (Shared*)mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  // The number of GPUs is asked in a child: CUDA must not be touched before the ranks are forked.
  if (fork() == 0) {
    int devices = 0;
    cudaGetDeviceCount(&devices);
    shared->arrived = devices;
    _exit(0);
  }
  wait(nullptr);
  ranks = std::min<int>(shared->arrived, ranks_max);
  shared->arrived = 0;
  if (ranks < 2) {
    printf("two GPUs are needed, %d found\n", ranks);
    return 1;
  }
  std::vector<pid_t> children;
  for (int r = 1; r < ranks && !rank; ++r) {
    const pid_t child = fork();
    if (!child)
      rank = r;
    else
      children.push_back(child);
  }
  if (!rank && getenv("OUT")) file = fopen((std::string(getenv("OUT")) + "/p2p.txt").c_str(), "w");
  CU(cudaSetDevice(rank));
  CU(cudaFree(nullptr));
  std::thread(watch).detach();
  for (cudaStream_t& stream : streams) CU(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (int i = 0; i < 2; ++i) {
    CU(cudaMalloc((void**)&input[i], space));
    CU(cudaMalloc((void**)&output[i], space));
  }
  CU(cudaMalloc((void**)&bad, 8));
  CU(cudaMemset(bad, 0, 8));
  CU(cudaMalloc((void**)&found_on_device, received_max * sizeof(Found)));
  classify("nothing");

  Kernel cubin, newer, older;
  if (!open_driver()) {
    say("no driver\n");
    shared->failed = 1;
    _exit(1);
  }
  if (!load_kernel(folder + "/p2p.sm_90.cubin", true, cubin)) {
    say("no kernel in %s\n", folder.c_str());
    shared->failed = 1;
    _exit(1);
  }
  const bool has_newer = load_kernel(folder + "/p2p.compute_90.ptx", true, newer);
  const bool has_older = load_kernel(folder + "/p2p.compute_80.ptx", false, older);
  communicators[0].make(0, Config{});
  Config large;
  large.chunk = 65536;
  large.bulk_slots = 8;
  large.stages = 2;
  communicators[1].make(1, large);
  communicators[2].make(2, Config{});

  uint64_t wrong = 0;
  struct Part {
    const char* name;
    const Kernel* kernel;
    double share;
    bool there;
  };
  for (const Part& part : {Part{"sm_90 cubin", &cubin, 0.7, true}, Part{"compute_90 PTX", &newer, 0.15, has_newer}, Part{"compute_80 PTX (ordinary stores)", &older, 0.15, has_older}}) {
    if (!part.there) {
      say("%s: does not load here\n", part.name);
      continue;
    }
    const Verification verification = verify(*part.kernel, seconds * part.share, seed, 2);
    const uint64_t now = take_bad();
    wrong += now;
    say("%s: %llu operations in %llu groups over two communicators, %.1f GB, %llu wrong bytes (seed %llu, %d ranks)\n", part.name, (unsigned long long)verification.operations,
        (unsigned long long)verification.groups, verification.bytes / 1e9, (unsigned long long)now, (unsigned long long)seed, ranks);
  }
  verify_graph(cubin, seed);
  const uint64_t in_graphs = take_bad();
  wrong += in_graphs;
  say("captured group replayed 40 times between eager ones: %llu wrong bytes\n", (unsigned long long)in_graphs);
  // First rings as small as may be: 1 MiB of LL128 and 1 MiB of chunks, which grow eightfold.
  Config small;
  small.ll128_slots = small.bulk_slots = 2;
  communicators[3].make(3, small);
  for (const Part& part : {Part{"sm_90 cubin", &cubin, 0.5, true}, Part{"compute_80 PTX (ordinary stores)", &older, 0.3, has_older}}) {
    if (!part.there) continue;
    uint64_t grew = 0;
    const Verification verification = verify_growing(*part.kernel, seconds * part.share, seed, grew);
    verify_head_to_head(*part.kernel);
    const uint64_t now = take_bad();
    wrong += now;
    say("%s, growing: %llu operations in %llu groups while %llu rings grew, %.1f GB, %llu wrong bytes\n", part.name, (unsigned long long)verification.operations, (unsigned long long)verification.groups,
        (unsigned long long)grew, verification.bytes / 1e9, (unsigned long long)now);
  }
  verify_abort(cubin);
  say("RESULT: %s\n\n", wrong ? "WRONG" : "right");

  open_nccl();
  times(cubin);
  barrier();
  if (!rank) {
    for (pid_t child : children) waitpid(child, nullptr, 0);
    say("done\n");
  }
  _exit(wrong || shared->failed ? 1 : 0);
}

// For tests of kernels whose blocks are not all resident: GPUs with room for few blocks, several communicators on them, and a watch,
// so that kernels that wait for ever fail a test instead of hanging it.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>

#include "machine_host.h"

namespace residency {

using std::chrono::milliseconds;

// If nothing has moved for so long, the kernels wait for ever.
constexpr milliseconds patience{HOST_TSAN ? 60000 : 20000};
// A hang that no abort ends is ended by a signal.
constexpr unsigned seconds_max = 600;

// Threads that launch kernels and wait for them.
class Threads {
 public:
  void start(std::function<void()> run) {
    {
      // A thread that was started before may be ending.
      std::lock_guard<std::mutex> guard(lock_);
      ++running_;
    }
    threads_.emplace_back([this, run] {
      run();
      std::lock_guard<std::mutex> guard(lock_);
      --running_;
      ended_.notify_all();
    });
  }
  // Waits for all threads. False if no warp has moved anything for `patience`: then `stop` was called, and the threads have ended.
  bool join(const std::function<void()>& stop, milliseconds patience = residency::patience) {
    bool waits = false;
    {
      std::unique_lock<std::mutex> guard(lock_);
      while (running_ && !waits) {
        alarm(seconds_max);
        host::something_moved = false;
        waits = !ended_.wait_for(guard, patience, [&] { return running_ == 0; }) && !host::something_moved;
      }
    }
    if (waits) stop();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    return !waits;
  }

 private:
  std::mutex lock_;  // protects running_
  std::condition_variable ended_;
  uint32_t running_ = 0;
  std::vector<std::thread> threads_;
};

// A GPU for each rank. Kernels have at most `grid` blocks, in clusters of at most `cluster`.
struct Gpus {
  const uint32_t grid, cluster;
  std::vector<uint32_t> slots;
  std::deque<host::Device> devices;

  Gpus(uint32_t grid_, uint32_t cluster_, const std::vector<uint32_t>& slots_) : grid(grid_), cluster(cluster_), slots(slots_) {
    for (uint32_t of_rank : slots) devices.emplace_back(of_rank);
  }
  std::string name() const {
    std::string text = "room for";
    for (uint32_t of_rank : slots) text += " " + std::to_string(of_rank);
    return text + " blocks, grids to " + std::to_string(grid);
  }
  // At least so many kernels are resident at once, the last perhaps in part.
  uint32_t kernels(uint32_t rank) const { return slots[rank] / grid + (slots[rank] % grid >= cluster); }
};
// Room of each rank: at random, for about half of the ranks no more than `slots_min`; or `slots_min` for all.
inline std::vector<uint32_t> any_slots(host::Random& random, uint32_t ranks, uint32_t slots_min, uint32_t slots_max) {
  std::vector<uint32_t> slots(ranks, slots_min);
  if (random.below(3))
    for (uint32_t& of_rank : slots) of_rank += (uint32_t)(random.below(2) * random.below(slots_max - slots_min + 1));
  return slots;
}

// The order in which kernels of several communicators, each over all ranks, are launched: round by round in some order, which is
// reversed on some ranks. There are as many communicators as certainly progress: one rank has the first waiting kernels resident, another
// the last ones, and at least one kernel must be among both. (With one more, each could wait for a peer without room: NCCL's would, too.)
class Turns {
 public:
  Turns(Gpus& gpus, uint32_t communicators_max, host::Random& random) : gpus_(gpus), seed_(random.next()) {
    uint32_t least[2] = {communicators_max, communicators_max};
    for (uint32_t rank = 0; rank < gpus.slots.size(); ++rank) {
      reversed_.push_back(rank < 2 ? rank : (uint32_t)random.below(2));
      least[reversed_[rank]] = std::min(least[reversed_[rank]], gpus.kernels(rank));
    }
    communicators_ = std::min(communicators_max, least[0] + least[1] - 1);
  }
  uint32_t communicators() const { return communicators_; }
  // Waits until it is the turn of this rank's kernel, or `stopped`.
  void wait(uint32_t rank, uint32_t communicator, size_t round, const std::function<bool()>& stopped) {
    const size_t turn = round * communicators_ + place(rank, communicator, round);
    while (gpus_.devices[rank].launched != turn && !stopped()) usleep(50);
  }

 private:
  uint32_t place(uint32_t rank, uint32_t communicator, size_t round) const {
    std::vector<uint32_t> order(communicators_);
    for (uint32_t i = 0; i < communicators_; ++i) order[i] = i;
    host::Random random{seed_ ^ round * 0x10001};
    for (uint32_t i = communicators_; i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
    return reversed_[rank] ? communicators_ - 1 - order[communicator] : order[communicator];
  }

  Gpus& gpus_;
  const uint64_t seed_;
  std::vector<uint32_t> reversed_;  // [rank]
  uint32_t communicators_;
};

}  // namespace residency

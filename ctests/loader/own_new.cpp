// A C++ program with an allocator of its own: what its `new` gives, only its `delete` can take. It asks NCCL's version,
// catches what NCCL throws and cancels a thread that blocks in NCCL; it prints what happened.
#include <nccl.h>
#include <pthread.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <iostream>
#include <new>

constexpr size_t HEAD_BYTES = 16;

void* operator new(size_t bytes) {
  char* block = static_cast<char*>(malloc(bytes + HEAD_BYTES));
  if (!block) throw std::bad_alloc();
  return block + HEAD_BYTES;
}
void operator delete(void* given) noexcept {
  if (given) free(static_cast<char*>(given) - HEAD_BYTES);
}
void operator delete(void* given, size_t) noexcept { operator delete(given); }

template <class Call>
static void expect_exception(const char* name, Call call) {
  try {
    ncclResult_t result = call();
    std::cout << name << " answered " << result << std::endl;
  } catch (const std::exception& error) {
    std::cout << name << " threw " << error.what() << std::endl;
  }
}

static void* block(void*) {
  ncclUniqueId id{};
  ncclComm_t communicator = nullptr;
  ncclCommInitRank(&communicator, 2, id, 1);
  return nullptr;
}

int main() {
  int version = 0;
  ncclUniqueId id{};
  ncclComm_t communicator = nullptr;
  ncclGetVersion(&version);
  std::cout << "version " << version << std::endl;
  expect_exception("id", [&] { return ncclGetUniqueId(&id); });
  expect_exception("rank", [&] { return ncclCommInitRank(&communicator, 2, id, 0); });
  expect_exception("call", [&] { return ncclAllReduce(nullptr, nullptr, 0, ncclInt8, ncclSum, nullptr, nullptr); });
  expect_exception("group", [&] { return ncclGroupEnd(); });

  pthread_t thread;
  void* outcome = nullptr;
  if (pthread_create(&thread, nullptr, block, nullptr)) return 1;
  pthread_cancel(thread);
  pthread_join(thread, &outcome);
  std::cout << "thread " << (outcome == PTHREAD_CANCELED ? "cancelled" : "ended") << std::endl;
}

// What a launch costs the host by itself, and what stands beside it in an operation of ours. Nanoseconds a call, medians.
//
//   nvcc -O2 -std=c++17 -arch=sm_90 launch.cu -o launch -lcuda
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#define CU(call)                                                                     \
  do {                                                                               \
    const auto code_ = (call);                                                       \
    if (code_) printf("%s answered %d, line %d\n", #call, (int)code_, __LINE__);     \
  } while (0)

struct Parameter {
  char bytes[464];  // as many as a collective's
};
__global__ void nothing(Parameter parameter) {
  if (parameter.bytes[0]) __trap();
}

template <class Call>
void time(const char *name, Call call) {
  using Clock = std::chrono::steady_clock;
  const int calls = 50;
  std::vector<double> ns;
  for (int batch = 0; batch < 80; batch++) {
    CU(cuCtxSynchronize());
    const auto begin = Clock::now();
    for (int i = 0; i < calls; i++) call();
    ns.push_back(std::chrono::duration<double, std::nano>(Clock::now() - begin).count() / calls);
  }
  std::sort(ns.begin(), ns.end());
  printf("%-44s %6.0f (least %.0f)\n", name, ns[ns.size() / 2], ns[0]);
}

int main() {
  CU(cudaFree(nullptr));
  CUfunction function;
  CU(cudaGetFuncBySymbol(&function, (const void *)nothing));
  CUstream stream, other;
  CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CU(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  CUevent event;
  CU(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  Parameter parameter{};
  void *parameters[] = {&parameter};
  CUlaunchAttribute attributes[2]{};
  attributes[0].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  attributes[0].value.clusterDim = {4, 1, 1};
  attributes[1].id = CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN;
  attributes[1].value.memSyncDomain = CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE;
  auto launch = [&](unsigned count) {
    CUlaunchConfig configuration{8, 1, 1, 256, 1, 1, 0, stream, attributes, count};
    CU(cuLaunchKernelEx(&configuration, function, parameters, nullptr));
  };
  time("launch", [&] { launch(0); });
  time("launch in clusters, in the remote domain", [&] { launch(2); });
  time("the same, and an event recorded", [&] { launch(2); CU(cuEventRecord(event, stream)); });
  time("an event recorded", [&] { CU(cuEventRecord(event, stream)); });
  time("a wait for it", [&] { CU(cuStreamWaitEvent(other, event, 0)); });
  CUstreamCaptureStatus status;
  cuuint64_t capture;
  unsigned long long id;
  time("is it captured", [&] { CU(cuStreamGetCaptureInfo(stream, &status, &capture, nullptr, nullptr, nullptr, nullptr)); });
  time("a stream's id", [&] { CU(cuStreamGetId(stream, &id)); });
}

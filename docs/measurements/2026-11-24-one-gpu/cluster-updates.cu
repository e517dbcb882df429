#include <cuda.h>
#include <cuda_runtime.h>
#include <cstdio>
#include <cstring>
#define D(x) do { CUresult r = (x); if (r) { const char* t; cuGetErrorString(r, &t); printf("%s: %s\n", #x, t); exit(1);} } while (0)
extern "C" __global__ void a(int* out, int v) { atomicAdd(out, v); }
static CUfunction fa;
static void launch(CUstream s, int grid, int cluster, int* out, int v) {
  CUlaunchConfig c; memset(&c, 0, sizeof c);
  CUlaunchAttribute at[2]; int n = 0;
  if (cluster) { at[n].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION; at[n].value.clusterDim.x = cluster; at[n].value.clusterDim.y = at[n].value.clusterDim.z = 1; n++; }
  c.gridDimX = grid; c.gridDimY = c.gridDimZ = 1; c.blockDimX = 32; c.blockDimY = c.blockDimZ = 1; c.hStream = s; c.attrs = at; c.numAttrs = n;
  void* p[] = {&out, &v};
  D(cuLaunchKernelEx(&c, fa, p, nullptr));
}
static CUgraph capture(CUstream s, int grid, int cluster, int* out, int v, int times = 1) {
  CUgraph g; D(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_RELAXED));
  for (int i = 0; i < times; i++) launch(s, grid, cluster, out, v);
  D(cuStreamEndCapture(s, &g)); return g;
}
static int ran(CUstream s, CUgraphExec e, int* out) {
  int z = 0; cudaMemcpy(out, &z, 4, cudaMemcpyHostToDevice);
  CUresult r = cuGraphLaunch(e, s); CUresult q = cuStreamSynchronize(s);
  cudaMemcpy(&z, out, 4, cudaMemcpyDeviceToHost);
  printf(" launch %d sync %d sum %d", r, q, z); return z;
}
int main() {
  cudaSetDevice(0); cudaFree(0);
  cudaFunction_t f; cudaGetFuncBySymbol(&f, (const void*)a); fa = (CUfunction)f;
  CUstream s; D(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  int* out; cudaMalloc(&out, 4);
  struct { int g, c; } steps[][2] = {{{4, 4}, {1, 0}}, {{4, 4}, {1, 1}}, {{4, 4}, {8, 0}}, {{4,4},{6,0}}, {{1, 0}, {4, 4}}, {{1,1},{4,4}}, {{2, 0}, {1, 0}}, {{8,4},{4,4}}, {{8,4},{6,2}}};
  for (auto& st : steps) {
    CUgraph g = capture(s, st[0].g, st[0].c, out, 1); CUgraphExec e; D(cuGraphInstantiateWithFlags(&e, g, 0));
    printf("grid %d cluster %d:", st[0].g, st[0].c); ran(s, e, out);
    CUgraph h = capture(s, st[1].g, st[1].c, out, 1); CUgraphExecUpdateResultInfo info; memset(&info, 0, sizeof info);
    CUresult r = cuGraphExecUpdate(e, h, &info);
    printf(" -> grid %d cluster %d: update %d %d:", st[1].g, st[1].c, r, info.result); ran(s, e, out); printf("\n");
    cudaGetLastError(); cuGraphExecDestroy(e); cuGraphDestroy(g); cuGraphDestroy(h);
  }
  for (int round = 0; round < 3; round++)
    for (int c = 0; c < 2; c++) for (int grid = 1; grid <= 2; grid++) {
      CUgraph g = capture(s, grid, c, out, 1, 200); CUgraphExec e; D(cuGraphInstantiateWithFlags(&e, g, 0));
      cudaEvent_t b, t; cudaEventCreate(&b); cudaEventCreate(&t); float best = 1e9;
      for (int i = 0; i < 30; i++) { cudaEventRecord(b, (cudaStream_t)s); for (int j = 0; j < 10; j++) cuGraphLaunch(e, s); cudaEventRecord(t, (cudaStream_t)s); cudaEventSynchronize(t); float ms; cudaEventElapsedTime(&ms, b, t); if (ms < best) best = ms; }
      printf("graph of 200 kernels, grid %d, cluster attribute %d: %.3f us a kernel\n", grid, c, best); cuGraphExecDestroy(e); cuGraphDestroy(g);
      float eager = 1e9;
      for (int i = 0; i < 30; i++) { cudaEventRecord(b, (cudaStream_t)s); for (int j = 0; j < 200; j++) launch(s, grid, c, out, 1); cudaEventRecord(t, (cudaStream_t)s); cudaEventSynchronize(t); float ms; cudaEventElapsedTime(&ms, b, t); if (ms < eager) eager = ms; }
      printf("eager, grid %d, cluster attribute %d: %.3f us a kernel\n", grid, c, eager * 1000 / 200);
    }
}

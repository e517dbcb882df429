/* The part of the CUDA driver API that the tests call: names, signatures and numbers, nothing else.
 * The same prototypes fit NVIDIA's libcuda.so.1 and the simulator, so test binaries run on both. */
#ifndef WINDLASS_CTESTS_CUDA_DRIVER_H
#define WINDLASS_CTESTS_CUDA_DRIVER_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st* CUcontext;
typedef struct CUstream_st* CUstream;
typedef struct CUevent_st* CUevent;
typedef struct CUgraph_st* CUgraph;
typedef struct CUgraphExec_st* CUgraphExec;

enum {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_NO_DEVICE = 100,
  CUDA_ERROR_NOT_READY = 600,
};
enum { CU_STREAM_NON_BLOCKING = 1 };
enum { CU_EVENT_DISABLE_TIMING = 2 };
enum { CU_STREAM_WAIT_VALUE_GEQ = 0 };
enum {
  CU_STREAM_CAPTURE_MODE_GLOBAL = 0,
  CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
  CU_STREAM_CAPTURE_MODE_RELAXED = 2,
};

typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct { int type, id; } CUmemLocation;
typedef struct {
  int type, requestedHandleTypes;
  CUmemLocation location;
  void* win32HandleMetaData;
  unsigned char allocFlags[8];
} CUmemAllocationProp;
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;
enum {
  CU_MEM_ALLOCATION_TYPE_PINNED = 1,
  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
  CU_MEM_LOCATION_TYPE_DEVICE = 1,
  CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
  CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1,
};

CUresult cuInit(unsigned int flags);
CUresult cuDriverGetVersion(int* version);
CUresult cuGetErrorString(CUresult error, const char** text);
CUresult cuDeviceGetCount(int* count);
CUresult cuDeviceGet(CUdevice* device, int ordinal);
enum {
  CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
};
CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device);

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device);
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);
CUresult cuDevicePrimaryCtxReset_v2(CUdevice device);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuCtxGetCurrent(CUcontext* context);
CUresult cuCtxSynchronize(void);
enum { CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9 };
CUresult cuPointerGetAttribute(void* value, int attribute, CUdeviceptr address);

CUresult cuMemAlloc_v2(CUdeviceptr* pointer, size_t bytes);
CUresult cuMemFree_v2(CUdeviceptr pointer);
CUresult cuMemGetInfo_v2(size_t* free, size_t* total);
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes);
CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes);
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream);
CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream);
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream);
CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t bytes);
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream);

CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp* properties, int option);
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* properties,
                     unsigned long long flags);
CUresult cuMemRelease(CUmemGenericAllocationHandle handle);
CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr hint, unsigned long long flags);
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes);
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags);
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes);
CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* descriptions, size_t count);
CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* bytes, CUdeviceptr address);
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address);
CUresult cuMemExportToShareableHandle(void* shareable, CUmemGenericAllocationHandle handle, int type, unsigned long long flags);
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shareable, int type);

CUresult cuStreamCreate(CUstream* stream, unsigned int flags);
CUresult cuStreamDestroy_v2(CUstream stream);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuStreamQuery(CUstream stream);
CUresult cuLaunchHostFunc(CUstream stream, void (*function)(void*), void* data);
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags);
CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, unsigned int value, unsigned int flags);

CUresult cuEventCreate(CUevent* event, unsigned int flags);
CUresult cuEventDestroy_v2(CUevent event);
CUresult cuEventRecord(CUevent event, CUstream stream);
CUresult cuEventSynchronize(CUevent event);

CUresult cuThreadExchangeStreamCaptureMode(int* mode);
CUresult cuStreamBeginCapture_v2(CUstream stream, int mode);
CUresult cuMemAllocAsync(CUdeviceptr* address, size_t bytes, CUstream stream);
CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream);
CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph);
CUresult cuGraphCreate(CUgraph* graph, unsigned int flags);
CUresult cuGraphInstantiateWithFlags(CUgraphExec* executable, CUgraph graph, unsigned long long flags);
CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream);
CUresult cuGraphExecDestroy(CUgraphExec executable);
CUresult cuGraphDestroy(CUgraph graph);
CUresult cuGraphClone(CUgraph* clone, CUgraph original);
typedef struct CUgraphNode_st* CUgraphNode;
CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode* dependencies, const void* edges, size_t count,
                                     int mode);
CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* count);
CUresult cuGraphNodeGetType(CUgraphNode node, int* type);
enum { CU_GRAPH_NODE_TYPE_CONDITIONAL = 13, CU_GRAPH_COND_TYPE_IF = 0, CU_GRAPH_COND_ASSIGN_DEFAULT = 1 };
/* Parameters of a conditional node: the type, and its part of the driver's union. */
typedef struct {
  int type, reserved[3];
  unsigned long long handle;
  int kind;
  unsigned int size;
  CUgraph* bodies;
  CUcontext context;
  char rest[208];
} CUgraphNodeParams;
CUresult cuGraphConditionalHandleCreate(unsigned long long* handle, CUgraph graph, CUcontext context, unsigned int at_launch,
                                        unsigned int flags);
CUresult cuGraphAddNode_v2(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, const void* edges, size_t count,
                           CUgraphNodeParams* parameters);
typedef struct CUuserObject_st* CUuserObject;
enum { CU_USER_OBJECT_NO_DESTRUCTOR_SYNC = 1, CU_GRAPH_USER_OBJECT_MOVE = 1 };
CUresult cuUserObjectCreate(CUuserObject* object, void* pointer, void (*destroy)(void*), unsigned int references, unsigned int flags);
CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned int count, unsigned int flags);
typedef struct { int result; void *node, *from; } CUgraphExecUpdateResultInfo;
CUresult cuGraphExecUpdate_v2(CUgraphExec executable, CUgraph graph, CUgraphExecUpdateResultInfo* result);

CUresult cuGraphAddChildGraphNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies, size_t count, CUgraph child);

/* Functions for GPUs only: the simulator compiles no PTX, and updates no single nodes. */
CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec executable, CUgraphNode node, CUgraph child);
typedef struct CUmod_st* CUmodule;
typedef struct CUfunc_st* CUfunction;
CUresult cuModuleLoadData(CUmodule* module, const void* image);
CUresult cuModuleUnload(CUmodule module);
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name);
CUresult cuLaunchKernel(CUfunction function, unsigned int blocks, unsigned int blocks_y, unsigned int blocks_z, unsigned int threads,
                        unsigned int threads_y, unsigned int threads_z, unsigned int shared_bytes, CUstream stream, void** parameters,
                        void** extra);

#ifdef __cplusplus
}
#endif
#endif

// SD_HD marks small functions shared by a kernel and its CPU twin.
#pragma once

#ifdef __CUDACC__
#define SD_HD __host__ __device__ __forceinline__
#else
#define SD_HD inline
#endif

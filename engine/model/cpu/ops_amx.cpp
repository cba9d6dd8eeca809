// The operations with products of bfloat16 (-DELEMENT=Bf16) on AMX tiles.
#include <sys/syscall.h>
#include <unistd.h>

#include "gemm_amx.h"
#include "ops.h"

// Requests the kernel's permission to use the tiles; 0: granted. Once per process.
extern "C" int32_t amx_request() {
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */);
}

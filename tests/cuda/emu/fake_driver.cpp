/* libcuda.so.1 in small: the driver calls that the project makes, over the emulated kernels. Streams run at once.
 *
 * fake_fail(call, status): the next use of `call` returns `status`. fake_read_only(known): whether host memory can be
 * registered as read-only; not at first. fake_live(): allocations, registered host ranges,
 * events and streams that exist. fake_launches(): kernels launched so far.
 */
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <string>

namespace {

std::string failing;
int failing_status, objects, launches;
std::map<uint64_t, size_t> memory;
struct Registration {
    size_t bytes;
    unsigned flags;
};
std::map<uint64_t, Registration> registered; /* host memory */
const unsigned READ_ONLY = 8;
bool knows_read_only; /* the last driver for Fermi cards does not */
const size_t CARD_BYTES = 256 << 20;
const int OUT_OF_MEMORY = 2, NOT_FOUND = 500, INVALID_VALUE = 1;

int fail(const char *call) {
    if (failing != call) return 0;
    failing.clear();
    return failing_status;
}

size_t used() {
    size_t sum = 0;
    for (const auto &entry : memory) sum += entry.second;
    return sum;
}

/* Whether [at, at + bytes) lies in one allocation. */
bool inside(uint64_t at, size_t bytes) {
    auto after = memory.upper_bound(at);
    if (after == memory.begin()) return false;
    --after;
    return at + bytes <= after->first + after->second;
}

/* Whether host memory is registered as one that the card never writes. */
bool only_read(uint64_t at) {
    auto after = registered.upper_bound(at);
    if (after == registered.begin()) return false;
    --after;
    return at < after->first + after->second.bytes && after->second.flags == READ_ONLY;
}

}  // namespace

#define CALL(name)                        \
    if (int status = fail(name)) return status

extern "C" {

void fake_fail(const char *call, int status) {
    failing = call;
    failing_status = status;
}
void fake_read_only(int known) { knows_read_only = known; }
int fake_launches() { return launches; }
int fake_live() { return (int)memory.size() + objects; }

int cuInit(unsigned) {
    CALL("cuInit");
    return 0;
}
int cuDeviceGetCount(int *count) {
    *count = 1;
    CALL("cuDeviceGetCount");
    return 0;
}
int cuDeviceGet(int *device, int) { return *device = 0; }
int cuDevicePrimaryCtxRetain(void **context, int) {
    *context = &memory;
    return 0;
}
int cuDevicePrimaryCtxRelease(int) {
    for (auto &entry : memory) free((void *)entry.first);
    memory.clear();
    objects = 0;
    return 0;
}
int cuCtxSetCurrent(void *) { return 0; }
int cuDeviceGetName(char *name, int bytes, int) { return snprintf(name, bytes, "Emulated Fermi") < 0; }
int cuDeviceGetAttribute(int *value, int attribute, int) {
    *value = attribute == 75 ? 2 : 0;
    return 0;
}
int cuDriverGetVersion(int *version) {
    *version = 9010;
    return 0;
}
int cuGetErrorName(int status, const char **name) {
    *name = status == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : status == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR";
    return 0;
}
int cuModuleLoadDataEx(void **module, const char *text, unsigned count, const int *options, void **values) {
    if (count != 2 || options[0] != 5 || options[1] != 6) return INVALID_VALUE;
    snprintf((char *)values[0], (size_t)values[1], "line 1: refused");
    *module = (void *)text;
    CALL("cuModuleLoadDataEx");
    return 0;
}
int cuModuleGetFunction(void **function, void *, const char *name) {
    Dl_info self; /* the kernels are in this very library */
    dladdr((void *)fake_live, &self);
    void *library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *function = dlsym(library, (std::string("emu_") + name).c_str());
    return *function ? 0 : NOT_FOUND;
}
int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    *total = CARD_BYTES;
    *free_bytes = CARD_BYTES - used();
    return 0;
}
int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    CALL("cuMemAlloc_v2");
    void *block = nullptr;
    if (used() + bytes > CARD_BYTES || posix_memalign(&block, 256, bytes)) return OUT_OF_MEMORY;
    memset(block, 0xFF, bytes);
    *address = (uint64_t)block;
    memory[*address] = bytes;
    return 0;
}
int cuMemFree_v2(uint64_t address) {
    if (!memory.erase(address)) return INVALID_VALUE;
    free((void *)address);
    return 0;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *) {
    CALL("cuMemcpyHtoDAsync_v2");
    if (!inside(to, bytes)) return INVALID_VALUE;
    memcpy((void *)to, from, bytes);
    return 0;
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *) {
    CALL("cuMemcpyDtoHAsync_v2");
    if (!inside(from, bytes) || only_read((uint64_t)to)) return INVALID_VALUE;
    memcpy(to, (void *)from, bytes);
    return 0;
}
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void *) {
    CALL("cuMemsetD8Async");
    if (!inside(to, bytes)) return INVALID_VALUE;
    memset((void *)to, value, bytes);
    return 0;
}
int cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) {
    if (flags & ~READ_ONLY || (flags && !knows_read_only)) return INVALID_VALUE;
    CALL("cuMemHostRegister_v2");
    registered[(uint64_t)address] = {bytes, flags};
    ++objects;
    return 0;
}
int cuMemHostUnregister(void *address) {
    registered.erase((uint64_t)address);
    return --objects < 0;
}
int cuStreamCreateWithPriority(void **stream, unsigned, int) {
    *stream = &failing;
    ++objects;
    return 0;
}
int cuStreamSynchronize(void *) {
    CALL("cuStreamSynchronize");
    return 0;
}
int cuStreamWaitEvent(void *, void *event, unsigned) { return event ? 0 : INVALID_VALUE; }
int cuEventCreate(void **event, unsigned) {
    *event = malloc(1);
    ++objects;
    return 0;
}
int cuEventDestroy_v2(void *event) {
    free(event);
    return --objects < 0;
}
int cuEventRecord(void *event, void *) { return event ? 0 : INVALID_VALUE; }
int cuEventSynchronize(void *event) { return event ? 0 : INVALID_VALUE; }
int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned threads, unsigned block_y,
                   unsigned block_z, unsigned shared, void *, void **arguments, void **extra) {
    CALL("cuLaunchKernel");
    if (!grid_x || !grid_y || grid_x > 65535 || grid_y > 65535 || grid_z != 1 || block_y != 1 || block_z != 1 || shared || extra)
        return INVALID_VALUE;
    const unsigned grid[2] = {grid_x, grid_y};
    ++launches;
    ((void (*)(const unsigned *, unsigned, void **))function)(grid, threads, arguments);
    return 0;
}

}  // extern "C"

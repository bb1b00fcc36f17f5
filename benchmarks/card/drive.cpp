// PyTorch's own caching allocator, driven by a trace on stdin: "m ID BYTES", "f ID", "e" to empty the cache. After each
// event one line: bytes requested, allocated and reserved, or "full" where a request was refused, whose release does nothing.

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/PeerToPeerAccess.h>

#include <iostream>
#include <unordered_map>

int main() {
  namespace allocator = c10::cuda::CUDACachingAllocator;
  allocator::init(1);
  c10::cuda::detail::init_p2p_access_cache(1);
  std::unordered_map<long, void*> held;
  char action = 0;
  long id = 0;
  size_t size = 0;
  while (std::cin >> action) {
    try {
      if (action == 'm') {
        std::cin >> id >> size;
        held[id] = allocator::raw_alloc(size);
      } else if (action == 'f') {
        std::cin >> id;
        if (const auto found = held.find(id); found != held.end()) {
          allocator::raw_delete(found->second);
          held.erase(found);
        }
      } else {
        allocator::emptyCache();
      }
    } catch (const c10::OutOfMemoryError&) {
      std::cout << "full\n";
      continue;
    }
    const auto stats = allocator::getDeviceStats(0);
    std::cout << stats.requested_bytes[0].current << ' ' << stats.allocated_bytes[0].current << ' '
              << stats.reserved_bytes[0].current << '\n';
  }
}

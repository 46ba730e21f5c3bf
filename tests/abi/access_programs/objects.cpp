// An instrumented C++ program with virtual tables, standard atomics, exceptions and threads. It is
// recorded through the environment variable STRAP_ACCESS, and prints its results.
#include <atomic>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

struct Shape {
  virtual ~Shape() = default;
  virtual int area() const = 0;
};
struct Square final : Shape {
  int side;
  explicit Square(int s) : side(s) {}
  int area() const override { return side * side; }
};

struct alignas(16) Pair {
  long a, b;
};

static std::atomic<long> total{0};
static std::atomic<bool> flag{false};

static void add(const std::vector<std::shared_ptr<Shape>> &shapes) {
  for (const auto &s : shapes) total += s->area();
  bool expected = false;
  flag.compare_exchange_strong(expected, true);
}

int main() {
  std::vector<std::shared_ptr<Shape>> shapes;
  for (int i = 0; i < 100; i++) shapes.push_back(std::make_shared<Square>(i));
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; i++) threads.emplace_back(add, std::cref(shapes));
  for (auto &t : threads) t.join();
  try {
    throw std::runtime_error("thrown");
  } catch (const std::exception &e) {
    std::printf("%s, total %ld, flag %d, use %ld\n", e.what(), total.load(), flag.load(),
                shapes[0].use_count());
  }
  return 0;
}

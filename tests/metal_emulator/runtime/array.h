// A growable array of plain data, never freed: the runtime is built without the C++ standard library, and its arrays
// live as long as the process.
#pragma once
#include <stdlib.h>
#include <string.h>

template <class T>
class Array {
 public:
  Array() = default;
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  size_t size() const { return size_; }
  T& operator[](size_t i) { return items_[i]; }
  T* begin() { return items_; }
  T* end() { return items_ + size_; }

  void clear() { size_ = 0; }
  // Grows or shrinks to n items, all zero bytes.
  void reset(size_t n) {
    reserve(n);
    size_ = n;
    if (n) {
      memset((void*)items_, 0, n * sizeof(T));
    }
  }
  // The reference is good until the next push.
  T& push(const T& item) {
    reserve(size_ + 1);
    items_[size_] = item;
    return items_[size_++];
  }

 private:
  void reserve(size_t n) {
    if (n <= room_) {
      return;
    }
    room_ = n < 2 * room_ ? 2 * room_ : n;
    items_ = (T*)realloc((void*)items_, room_ * sizeof(T));
    if (!items_) {
      abort();
    }
  }
  T* items_ = nullptr;
  size_t size_ = 0, room_ = 0;
};

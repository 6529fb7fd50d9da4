// Exception types; python/module.cpp translates each to the Python exception of the same name.
#pragma once

#include <stdexcept>
#include <string>

namespace specdec {

struct TypeError : std::runtime_error {
  using runtime_error::runtime_error;
};
struct ValueError : std::runtime_error {
  using runtime_error::runtime_error;
};
struct NotImplementedError : std::runtime_error {
  using runtime_error::runtime_error;
};
struct CudaError : std::runtime_error {  // RuntimeError in Python
  using runtime_error::runtime_error;
};

}  // namespace specdec

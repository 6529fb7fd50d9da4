// Tensors as the memory of rings.
#pragma once

#include <pybind11/pybind11.h>

#include <limits>
#include <string>

#include "core/check.h"
#include "core/errors.h"
#include "python/casters.h"
#include "python/python_tensor.h"
#include "scheduler/config.h"
#include "scheduler/rings.h"

namespace specdec::python {

// Returns a view of a tensor, which `tensor` keeps alive. Throws TypeError for other objects.
inline TensorView named_tensor(const char* op, const char* name, const pybind11::object& object, PyTensor& tensor) try {
  TensorView view;
  if (!tensor.load(object.ptr(), view)) throw pybind11::error_already_set();
  return view;
} catch (const TypeError& error) {
  throw TypeError(std::string(op) + ": " + name + " " + error.what());
}

// Returns the memory of a ring [depth, width] of at least these sizes, which the caller keeps alive.
inline scheduler::RingMemory ring_memory(const char* op, const char* name, const pybind11::object& object,
                                         int64_t min_depth, int64_t min_width) {
  PyTensor tensor;
  const TensorView view = named_tensor(op, name, object, tensor);
  Check check(op);
  Dim depth{"depth"}, width{"width"};
  check.output(name, view, {depth, width}, kInt32);
  check.require_cpu();
  check.range((std::string(name) + ".shape[0]").c_str(), depth, min_depth, std::numeric_limits<int32_t>::max());
  check.range((std::string(name) + ".shape[1]").c_str(), width, min_width, std::numeric_limits<int32_t>::max());
  return {view.data<int32_t>(), depth, width};
}

// The rings of a scheduler with these sizes, and what their words mean.
struct RingsOf {
  RingsOf(const char* op, const scheduler::Config& config, const pybind11::object& commands,
          const pybind11::object& results)
      : command_layout{config.max_batch(), config.num_slots, config.max_stops},
        result_layout{config.accept_width, config.num_levels(), config.max_logprobs},
        commands(ring_memory(op, "commands", commands, 2, command_layout.words())),
        results(ring_memory(op, "results", results, config.rounds_in_flight + 1,
                            result_layout.words(config.max_batch()))) {}

  round::CommandLayout command_layout;
  round::ResultLayout result_layout;
  scheduler::RingMemory commands, results;
};

}  // namespace specdec::python

template <>
struct pybind11::detail::type_caster<specdec::scheduler::Config> : initialised_caster<specdec::scheduler::Config> {};

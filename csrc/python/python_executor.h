// The Python executor as C++ calls it: each call takes the GIL, except for rounds that are launched as graphs.
#pragma once

#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "python/casters.h"
#include "python/gil.h"
#include "scheduler/replay.h"
#include "scheduler/round_graphs.h"

namespace specdec::python {

namespace py = pybind11;

using scheduler::AdmittedRequest;
using scheduler::Chunk;
using scheduler::Constrained;
using scheduler::Entries;
using scheduler::RoundGraphs;
using scheduler::Tokens;

// An AdmittedRequest that owns its values.
struct PyAdmittedRequest {
  int64_t id = 0;
  py::list tokens = py::list();
  int32_t ngram_group = 0;
  py::object extra = py::none();
  py::list cached_entries = py::list();
  int32_t snapshot = -1;
};

// A Chunk that owns its tokens, the one after its rows included.
struct PyChunk {
  int32_t slot = 0;
  int64_t start = 0;
  py::list tokens = py::list();
};

// A Constrained that owns its tokens.
struct PyConstrained {
  int64_t row = 0;
  int32_t slot = 0;
  py::list tokens = py::list();
};

inline py::list list_of(Tokens tokens) {
  py::list list(tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) list[i] = tokens[i];
  return list;
}

class PyExecutor : public scheduler::Executor {
 public:
  // `graphs` may be null: then every launch is a Python call, after which the device is idle or `progress` is called.
  PyExecutor(py::object object, std::unique_ptr<RoundGraphs> graphs)
      : object_(std::move(object)), graphs_(std::move(graphs)) {}
  py::object& object() { return object_; }
  // Records launches for the other ranks from now on, and compares rounds with theirs. What the other calls record is
  // the Python executor's matter.
  void record_launches(const scheduler::LaunchWriter& writer) { writer_.emplace(writer); }
  void reset_records() {
    if (writer_) writer_->reset();
  }

  void set_graphs(const std::map<RoundGraphs::Size, std::vector<intptr_t>>& graphs) {
    graphs_->clear();
    for (const auto& [size, addresses] : graphs) {
      std::vector<CUgraph_st*> parts;
      for (const intptr_t address : addresses) parts.push_back(reinterpret_cast<CUgraph_st*>(address));
      graphs_->add(size, parts);
    }
  }

  void begin(int32_t slot, const AdmittedRequest& request) override {
    guarded([&] {
      const WithGil gil;
      const py::object extra = request.extra ? py::reinterpret_borrow<py::object>(static_cast<PyObject*>(request.extra))
                                             : py::object(py::none());
      object_.attr("begin")(slot, PyAdmittedRequest{.id = request.id,
                                                    .tokens = list_of(request.tokens),
                                                    .ngram_group = request.ngram_group,
                                                    .extra = extra,
                                                    .cached_entries = list_of(request.cached_entries),
                                                    .snapshot = request.snapshot});
    });
  }
  void prefill(std::span<const Chunk> chunks) override {
    guarded([&] {
      const WithGil gil;
      py::list list;
      for (const Chunk& chunk : chunks) {
        py::list tokens = list_of(chunk.tokens);
        tokens.append(chunk.next);
        list.append(PyChunk{.slot = chunk.slot, .start = chunk.start, .tokens = std::move(tokens)});
      }
      object_.attr("prefill")(list);
    });
  }
  void save_snapshots(std::span<const int32_t> slots, std::span<const int32_t> snapshots) override {
    guarded([&] { call("save_snapshots", slots, snapshots); });
  }
  void activate(std::span<const int32_t> slots) override {
    guarded([&] { call("activate", slots); });
  }
  void launch(int64_t batch, int64_t rows, int64_t max_kv_len) override {
    launch_part(scheduler::RoundPart::kAll, RoundGraphs::Part::kAll, "launch", batch, rows, max_kv_len);
  }
  void forward(int64_t batch, int64_t rows, int64_t max_kv_len) override {
    launch_part(scheduler::RoundPart::kForward, RoundGraphs::Part::kFirst, "forward", batch, rows, max_kv_len);
  }
  void constrain(int64_t number, std::span<const Constrained> requests, int64_t batch, int64_t rows,
                 int64_t max_kv_len) override {
    guarded([&] {
      const WithGil gil;
      py::list list;
      for (const Constrained& each : requests)
        list.append(PyConstrained{.row = each.row, .slot = each.slot, .tokens = list_of(each.tokens)});
      object_.attr("constrain")(number, list, batch, rows);
    });
    launch_part(scheduler::RoundPart::kRest, RoundGraphs::Part::kRest, "finish", batch, rows, max_kv_len);
  }
  void deactivate(std::span<const int32_t> slots) override {
    guarded([&] { call("deactivate", slots); });
  }
  bool busy() override {
    expect_alive();
    return graphs_ && graphs_->busy();
  }
  scheduler::Progress progress() override {
    const WithGil gil;
    const auto [applied, published] = object_.attr("progress")().cast<std::pair<int64_t, int64_t>>();
    return {applied, published};
  }
  void assign_pages(Entries sources, Entries destinations) override {
    guarded([&] { call("assign_pages", sources, destinations); });
  }
  void expect_alive() override {
    if (writer_) writer_->channel().expect_alive();
  }
  int64_t agree(int64_t number, int64_t batch, const std::function<std::string(int64_t)>& name_of_row) override {
    return writer_ ? writer_->compare(number, batch, name_of_row) : 0;
  }

 private:
  // Makes a call. With other ranks an exception ends all of them, since it is not known how far they are.
  template <class Call>
  void guarded(Call&& call) {
    if (!writer_) return call();
    try {
      call();
      writer_->channel().made();
    } catch (const std::exception& error) {
      writer_->channel().fail_unless_others(std::string("rank 0: ") + error.what());
      expect_alive();
      throw;
    }
  }
  void launch_part(scheduler::RoundPart part, RoundGraphs::Part graph_part, const char* method, int64_t batch,
                   int64_t rows, int64_t max_kv_len) {
    guarded([&] {
      if (writer_) writer_->write(part, batch, rows, max_kv_len);
      if (!graphs_ || !graphs_->launch({batch, rows, max_kv_len}, graph_part)) call(method, batch, rows, max_kv_len);
    });
  }
  template <class... Args>
  void call(const char* method, const Args&... args) {
    const WithGil gil;
    object_.attr(method)(argument(args)...);
  }
  template <class T>
  static const T& argument(const T& value) {
    return value;
  }
  static std::vector<int32_t> argument(Tokens tokens) { return {tokens.begin(), tokens.end()}; }

  py::object object_;
  std::unique_ptr<RoundGraphs> graphs_;
  std::optional<scheduler::LaunchWriter> writer_;
};

}  // namespace specdec::python

template <>
struct pybind11::detail::type_caster<specdec::python::PyAdmittedRequest>
    : initialised_caster<specdec::python::PyAdmittedRequest> {};
template <>
struct pybind11::detail::type_caster<specdec::python::PyChunk> : initialised_caster<specdec::python::PyChunk> {};
template <>
struct pybind11::detail::type_caster<specdec::python::PyConstrained>
    : initialised_caster<specdec::python::PyConstrained> {};
template <>
struct pybind11::detail::type_caster<specdec::scheduler::ReplayChannel>
    : initialised_caster<specdec::scheduler::ReplayChannel> {};

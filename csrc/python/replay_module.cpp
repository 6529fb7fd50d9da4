// Binds replay: the channel between the ranks of a divided model, and what follows rank 0.
#include "python/fields.h"
#include "python/module.h"
#include "python/python_executor.h"
#include "python/rings.h"
#include "scheduler/replay.h"

template <>
struct pybind11::detail::type_caster<specdec::scheduler::ReplaySizes>
    : initialised_caster<specdec::scheduler::ReplaySizes> {};

namespace specdec::python {
namespace {

using namespace py::literals;
using scheduler::ReplayChannel, scheduler::ReplaySizes;

// A channel that owns its memory.
struct MemoryOwner {
  py::object memory;
};
struct PyChannel : private MemoryOwner, public ReplayChannel {
  PyChannel(py::object memory, std::byte* data, const ReplaySizes& sizes, int64_t rank)
      : MemoryOwner{std::move(memory)}, ReplayChannel(data, sizes, rank) {}
};

std::unique_ptr<PyChannel> make_channel(const py::object& memory, const ReplaySizes& sizes, int64_t rank) {
  Check check("ReplayChannel");
  check.range("num_ranks", sizes.num_ranks, 2, 1024);
  check.range("rank", rank, 0, sizes.num_ranks - 1);
  for (const auto& [name, value] :
       {std::pair("capacity", sizes.capacity), {"depth", sizes.depth}, {"words", sizes.words}})
    check.range(name, value, 1, int64_t{1} << 40);
  PyTensor tensor;
  const TensorView view = named_tensor("ReplayChannel", "memory", memory, tensor);
  Dim words{"words"};
  check.output("memory", view, {words}, kInt64);
  check.require_cpu();
  check.range("memory.shape[0]", words, (ReplayChannel::bytes(sizes) + 7) / 8, std::numeric_limits<int64_t>::max());
  auto* data = reinterpret_cast<std::byte*>(view.data<int64_t>());
  check.that(reinterpret_cast<uintptr_t>(data) % 64 == 0, "memory", "is not aligned", "at 64 bytes");
  return std::make_unique<PyChannel>(memory, data, sizes, rank);
}

// A replayer that owns its executor, the rings and the channel.
struct ReplayerParts {
  PyExecutor executor;
  py::tuple owned;
};
struct PyReplayer : private ReplayerParts, public scheduler::Replayer {
  PyReplayer(py::object executor, std::unique_ptr<RoundGraphs> graphs, py::tuple owned, ReplayChannel& channel,
             const RingsOf& rings)
      : ReplayerParts{PyExecutor(std::move(executor), std::move(graphs)), std::move(owned)},
        Replayer(channel, ReplayerParts::executor, rings.commands, rings.results, rings.result_layout) {}
  void set_graphs(const std::map<RoundGraphs::Size, std::vector<intptr_t>>& graphs) {
    ReplayerParts::executor.set_graphs(graphs);
    reset();
  }
};

std::unique_ptr<PyReplayer> make_replayer(py::object executor, const py::object& channel,
                                          const scheduler::Config& config, const py::object& commands,
                                          const py::object& results, std::optional<intptr_t> stream,
                                          const std::map<RoundGraphs::Size, std::vector<intptr_t>>& graphs) {
  scheduler::check_config(config);
  const RingsOf rings("Replayer", config, commands, results);
  Check("Replayer").that(stream || graphs.empty(), "stream", "is None", "the stream that graphs are launched on");
  std::unique_ptr<RoundGraphs> round_graphs;
  if (stream) round_graphs = std::make_unique<RoundGraphs>(reinterpret_cast<CUstream_st*>(*stream));
  auto made =
      std::make_unique<PyReplayer>(std::move(executor), std::move(round_graphs),
                                   py::make_tuple(channel, commands, results), channel.cast<ReplayChannel&>(), rings);
  if (!graphs.empty()) made->set_graphs(graphs);
  return made;
}

}  // namespace

void add_replay(py::module_& m) {
  using Release = py::call_guard<WithoutGil>;
  py::class_<ReplaySizes> sizes(m, "ReplaySizes", "the sizes of the memory that ranks share");
  def_fields(sizes, required("num_ranks", &ReplaySizes::num_ranks), required("capacity", &ReplaySizes::capacity),
             required("depth", &ReplaySizes::depth), required("words", &ReplaySizes::words));
  sizes.def_property_readonly("bytes", &ReplayChannel::bytes);
  py::class_<ReplayChannel>(m, "ReplayChannel", "the memory that the ranks of a host share, as one of them sees it")
      .def(py::init([](const py::object& memory, const ReplaySizes& of,
                       int64_t rank) -> std::unique_ptr<ReplayChannel> { return make_channel(memory, of, rank); }),
           "memory"_a, "sizes"_a, "rank"_a)
      .def(
          "write",
          [](ReplayChannel& channel, std::string_view record, std::string_view name) { channel.write(record, name); },
          "record"_a, "name"_a, Release())
      .def("enter", &ReplayChannel::enter, "name"_a)
      .def("made", &ReplayChannel::made)
      .def("close", &ReplayChannel::close)
      .def("fail", &ReplayChannel::fail, "reason"_a)
      .def("fail_unless_others", &ReplayChannel::fail_unless_others, "reason"_a, Release())
      .def(
          "watch",
          [](ReplayChannel& channel, double most_delay) {
            channel.watch(std::chrono::milliseconds(static_cast<int64_t>(1000 * most_delay)));
          },
          "most_delay"_a = 30.0)
      .def(
          "watch_alarm",
          [](ReplayChannel& channel, const py::object& alarm, const std::string& what) {
            Check check("ReplayChannel");
            PyTensor tensor;
            const TensorView view = named_tensor("ReplayChannel", "alarm", alarm, tensor);
            check.output("alarm", view, {1}, kInt32);
            check.require_cpu();
            channel.watch_alarm(reinterpret_cast<const uint32_t*>(view.data<int32_t>()), what);
          },
          "alarm"_a, "what"_a, py::keep_alive<1, 2>())
      .def("process", &ReplayChannel::process, "rank"_a)
      .def_property_readonly("rank", &ReplayChannel::rank)
      .def_property_readonly("failure", &ReplayChannel::failure)
      .def_property_readonly("closed", &ReplayChannel::closed);
  py::class_<PyReplayer>(m, "Replayer", "makes the executor calls that rank 0 records")
      .def(py::init(&make_replayer), "executor"_a, "channel"_a, "config"_a, py::kw_only(), "commands"_a, "results"_a,
           "stream"_a = py::none(), "graphs"_a = py::dict())
      .def("next",
           [](PyReplayer& replayer) -> py::object {
             std::optional<std::string> record;
             {
               const WithoutGil released;
               record = replayer.next();
             }
             return record ? py::object(py::bytes(*record)) : py::object(py::none());
           })
      .def("set_graphs", &PyReplayer::set_graphs, "graphs"_a);
}

}  // namespace specdec::python

// Python bindings of NgramIndex. `ngram.py` documents the class.
#include <array>
#include <vector>

#include "ngram/ngram_index.h"
#include "python/fast_op.h"
#include "python/module.h"

template <>
struct pybind11::detail::type_caster<specdec::ngram::NgramIndex> : initialised_caster<specdec::ngram::NgramIndex> {};

namespace specdec::python {
namespace {

using ngram::NgramIndex;

// Insert tokens. They are copied first, since another thread may resize the tensor while this one does not hold the
// GIL. (On a GPU, launches read them as any op reads its tensors.) `insert` itself checks the arguments.
void insert(NgramIndex& index, TensorView tokens, std::optional<int64_t> slot, int64_t group,
            std::optional<int64_t> start) {
  std::vector<int32_t> copy;
  const DLDeviceType device = tokens.dl.device.device_type;
  const bool on_host = device == kDLCPU || device == kDLCUDAHost;
  if (on_host && tokens.ndim() == 1 && tokens.stride(0) == 1 && dtype_of(tokens) == kInt32) {
    copy.assign(tokens.data<int32_t>(), tokens.data<int32_t>() + tokens.shape(0));
    tokens.dl.data = copy.data();
    tokens.dl.byte_offset = 0;
  }
  const WithoutGil released;
  index.insert(tokens, slot, group, start);
}

}  // namespace

void add_ngram_index(py::module_& m) {
  using Release = py::call_guard<WithoutGil>;
  py::class_<NgramIndex> index(m, "NgramIndex", "N-gram index: drafts from text seen before");
  def_method<&NgramIndex::extend>(index, "extend", "tokens num_valid slots match_len",
                                  "Append the tokens of a round to the streams of its slots");
  def_method<&NgramIndex::draft>(
      index, "draft",
      "slots seq_lens num_nodes chain min_prob min_match own_weight group_weight global_weight recency out_tokens "
      "out_parents out_positions out_first_child out_next_sibling out_mask out_num_nodes out_scores out_match_len",
      "Draft trees that continue the streams of slots");
  index.def(py::init<int64_t, int64_t, int64_t, int64_t, const OptTensor&>(), Release())
      .def_static("load", &NgramIndex::load, Release())
      .def("save", &NgramIndex::save, Release())
      .def("copy", &NgramIndex::copy, Release())
      .def("begin", &NgramIndex::begin, Release())
      .def("length", &NgramIndex::length, Release())
      .def("insert", &insert)
      .def("release", &NgramIndex::release, Release())
      .def("clear", &NgramIndex::clear, Release())
      .def("statistics",
           [](const NgramIndex& index) {
             const auto [h, capacity] = index.statistics();
             const double load = static_cast<double>(h.entries) / static_cast<double>(capacity);
             return py::make_tuple(h.inserted, h.held, h.entries, load, h.evictions, h.drafts, h.matches, h.drafted,
                                   std::to_array(h.rounds_by_match), std::to_array(h.accepted_by_match), h.refused);
           })
      .def("digest", &NgramIndex::digest, Release())
      .def_property_readonly("num_bytes", &NgramIndex::num_bytes)
      .def_property_readonly("device_words", &NgramIndex::device_words);
}

}  // namespace specdec::python

// Binds the ops of csrc/kv. `specdec_kernels.ops` documents the arguments.
#include "kv/alloc_pages.h"
#include "kv/assign_pages.h"
#include "kv/copy_kv.h"
#include "kv/fork_pages.h"
#include "kv/free_pages.h"
#include "kv/move_kv.h"
#include "kv/write_kv.h"
#include "python/fast_op.h"
#include "python/module.h"

namespace specdec::python {

void add_kv(py::module_& m) {
  using namespace kv;
  def_op<&alloc_pages>(m, "alloc_pages", "stream pool seq_lens reserve slots status",
                       "allocate pages for the rows about to be written");
  def_op<&free_pages>(m, "free_pages", "stream pool prefix_lens window slots status",
                      "free the pages after the rows that slots keep");
  def_op<&fork_pages>(m, "fork_pages", "stream pool src_slots dst_slots prefix_lens status out",
                      "give empty slots a prefix of other slots, sharing full pages");
  def_op<&assign_pages>(m, "assign_pages", "stream pool src_entries dst_entries",
                        "copy page-table entries with reference counting");
  def_op<&write_kv>(m, "write_kv",
                    "stream k v k_pool v_pool page_table prefix_lens row_offset slots num_valid cu_seqlens_q page_refs "
                    "k_scale v_scale status",
                    "write the valid rows of new K and V to the slots' pages");
  def_op<&move_kv>(m, "move_kv", "stream k_pools v_pools page_table path num_valid prefix_lens slots page_refs status",
                   "compact the KV rows of an accepted path, in every layer");
  def_op<&copy_kv>(m, "copy_kv",
                   "stream k_pools v_pools page_table src_slots dst_slots prefix_lens num_rows page_refs status",
                   "copy rows of one slot to the same rows of another, in every layer");
}

}  // namespace specdec::python

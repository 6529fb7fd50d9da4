// Names of plans: "plain", or a kernel with its row tile, optionally followed by options, each after a dot.
//
// Used by the plans of tree_attention and mla_tree_attention, whose kernels and options differ. `name_of` returns the
// name of a kernel with a row tile.
#pragma once

#include <charconv>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.h"

namespace specdec::attention {

// Return "plain, sm80.mma.16, ...": every kernel with every row tile.
template <class Variant, class NameOf>
std::string all_kernel_names(const std::vector<Variant>& variants, const NameOf& name_of) {
  std::string names = "plain";
  for (const Variant& variant : variants) {
    const std::string name = ", " + name_of(variant.kernel, variant.tile_rows);
    if ((names + ",").find(name + ",") == std::string::npos) names += name;
  }
  return names;
}

// Parse the kernel and the row tile of a name into `options`; return the rest of the name, which is empty or begins
// with a dot. Throws if the name has no known kernel.
template <class Options, class Variant, class NameOf>
std::string_view parse_kernel(const Check& check, const std::string& name, const std::vector<Variant>& variants,
                              const NameOf& name_of, Options& options) {
  if (name == "plain") {
    options.kernel = decltype(Variant::kernel)::kPlain;
    return {};
  }
  for (const Variant& variant : variants) {
    const std::string known = name_of(variant.kernel, variant.tile_rows);
    if (name != known && name.compare(0, known.size() + 1, known + ".") != 0) continue;
    options.kernel = variant.kernel;
    options.tile_rows = variant.tile_rows;
    return std::string_view(name).substr(known.size());
  }
  check.that(false, "plan", "is " + name,
             "one of " + all_kernel_names(variants, name_of) + ", optionally followed by options");
  return {};
}

// Return the integer that the whole text is, or nothing.
inline std::optional<int> parse_number(std::string_view text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

}  // namespace specdec::attention

// The tuned numbers of the budget, one table.
//
// Where a comment names no record, none of how the value was chosen survives. What such a value does can be seen in
// tests/scheduler/budget_golden.txt, "the simulation" (test_budget_simulated.py next to it): rounds at the measured
// costs of an H200 (bench/results/h200-round-code.json, within a tenth), batch sizes 1 to 256, drafts from good to all
// wrong, with each number as it is, halved and doubled.
#pragma once

namespace specdec::scheduler {

struct BudgetConstants {
  // --- the gain model

  // Window of the moving average of predicted gains, in requests times rounds. A standard error of about 6 % at usual
  // accept lengths, and short enough to follow a text that changes.
  double gain_window = 32;
  // Window of the correction factor (observed / predicted gains), in requests times rounds. Longer, since a round shows
  // only how many drafts were accepted, which is noisy.
  double correction_window = 256;
  // Both windows hold at least this many rounds, however large the batch.
  double min_window_rounds = 2;
  // Weight of the optimistic prior, in observations (requests times rounds): drafts count as perfect until they are
  // seen. Too much gain above is found out as soon as it is tried; too little is never found out.
  double optimism = 4;
  // Weight of a segment's prior correction, in predicted tokens: that of the segment below. Calibrated scores are
  // right, and what one segment shows is mostly noise. It was 1; docs/tried.md, "Budget levels", says what
  // the record h200-adaptive shows with 4.
  double correction_prior = 4;
  // Greatest correction of scores that predict too little, a factor.
  double max_correction = 2;

  // --- exploring a higher level, whose gain is not observed from below

  // Most time that exploring takes, as a share of all time. docs/design.md promises it.
  double explore_time_share = 1.0 / 64;
  // Most time that exploring loses if the additional rows bring nothing, as a share of all time. With retime_loss_share
  // it bounds what the budget costs to 1 %: the record h200-adaptive-wrong (all drafts wrong) has 0.98 to 0.99 of plain
  // decoding, and about half of that loss is catching up.
  double explore_loss_share = 1.0 / 128;
  // Rounds of one exploration: the first shows nothing of a level above the round before it (docs/tried.md,
  // "Budget levels": with one round, 64 requests stayed at two nodes).
  int explore_rounds = 2;
  // An exploration round costs at most this much more than a round of the best level, a factor, if several levels are
  // above the best.
  double explore_max_cost = 2;

  // --- re-timing a lower level, whose gain is known and whose cost may have changed

  // Most time that re-timing takes, and most that it loses, as shares of all time.
  double retime_time_share = 1.0 / 128;
  double retime_loss_share = 1.0 / 512;

  // --- choosing

  // The level goes up only if the higher one has at least this much higher throughput, a factor: estimates waver.
  double switch_margin = 1.005;
};

}  // namespace specdec::scheduler

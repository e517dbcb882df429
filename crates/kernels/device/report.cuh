// Reports what a warp waited for when it leaves on an abort or a question of the host.
#pragma once
#include "machine.cuh"

// Called by one thread. An entry without room is dropped, but counted.
WINDLASS_DEVICE void report_entry(uint64_t address, uint32_t rank, const WindlassP2pReportEntry& entry) {
  WindlassP2pReport* const report = reinterpret_cast<WindlassP2pReport*>(address);
  if (!report) return;
  const uint32_t index = claim(&report->claimed);
  if (index >= WINDLASS_REPORT_ENTRIES) return;
  if (index == 0) report->rank = rank;
  report->entries[index] = entry;
}

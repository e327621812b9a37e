# %% [markdown]
# # From publish to plots
#
# This notebook follows the readings of `penstock demo` through Spark: traffic, latency, jobs, a stream, and the reconciliation.
# It is a script, too: `python examples/notebook.py DATA_DIR OUT_DIR` writes the plots to OUT_DIR. Jupyter opens it
# with jupytext.
#
# It needs Java 17 or newer and `pip install '.[spark]' matplotlib`.

# %%
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas
from pyspark.sql import functions as F

from penstock.spark import deliveries, ends, messages, reconcile
from penstock.spark.jobs.deviations import deviations
from penstock.spark.jobs.retention import retention_plan
from penstock.spark.jobs.silences import silences
from penstock.spark.jobs.traffic import traffic
from penstock.spark.session import open_session

arguments = [] if "ipykernel" in sys.modules else sys.argv[1:]
data_dir = Path(arguments[0] if arguments else "penstock-demo/data")
out_dir = Path(arguments[1] if len(arguments) > 1 else "notebook-output").absolute()
out_dir.mkdir(parents=True, exist_ok=True)
plt.rcParams.update({"figure.figsize": (8, 3), "figure.dpi": 100, "figure.constrained_layout.use": True})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none", "svg.hashsalt": "penstock"})

# %% [markdown]
# ## Publish
#
# Without a data directory, the demo makes one: devices publish temperatures over MQTT, and three consumers acknowledge them, of
# which one is killed and one is too slow. The node may also be one of yours that is running.

# %%
if not arguments and not data_dir.exists():
    subprocess.run([sys.executable, "-m", "penstock", "demo", "--dir", str(data_dir.parent)], check=True)

# %% [markdown]
# ## Read
#
# `messages` has the rows of the Parquet tables and of the log after them, up to its end.

# %%
spark = open_session(app_name="notebook")
published = messages(spark, data_dir)
print(f"{published.count():,} messages")
published.select("position", "time", "topic", F.col("body").cast("string")).show(3, truncate=80)

# %% [markdown]
# ## Traffic by topic over time
#
# Each line of the plant is the second level of the topic.

# %%
STEP_MS = 100
line = F.split_part("topic", F.lit("/"), F.lit(2))
step = F.timestamp_millis(F.col("at_ms") - F.col("at_ms") % STEP_MS)
by_line: pandas.DataFrame = published.groupBy(step.alias("time"), line.alias("line")).count().toPandas()
rates = by_line.pivot(index="time", columns="line", values="count").fillna(0).sort_index() * 1000 / STEP_MS

figure, axes = plt.subplots()
axes.stackplot((rates.index - rates.index[0]).total_seconds(), rates.T.to_numpy(), labels=rates.columns, step="post")
axes.set(title="Readings stored, by line", xlabel="seconds since the first", ylabel="per second")
axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, reverse=True)
figure.savefig(out_dir / "traffic.svg", metadata={"Date": None})

# %% [markdown]
# ## Latency
#
# `deliveries` has a row for each pop of a message, `ends` one for its acknowledgement. The messages of the consumer that was
# killed come back after their invisible time of three seconds, and are late.

# %%
delivery = ("group_id", "message_position")
stored = published.select(F.col("position").alias("message_position"), F.col("at_ms").alias("stored_ms"))
popped = deliveries(spark, data_dir).where("stage = 'popped'").groupBy(*delivery).agg(F.min("at_ms").alias("at_ms"))
acked = ends(spark, data_dir).where("cause = 'acked'").groupBy(*delivery).agg(F.max("at_ms").alias("at_ms"))
percents = [number / 2 for number in range(1, 200)]
latency_ms = F.percentile_approx(F.col("at_ms") - F.col("stored_ms"), [percent / 100 for percent in percents])
latencies = {
    name: dict(zip(percents, rows.join(stored, "message_position").agg(latency_ms).collect()[0][0], strict=True))
    for name, rows in (("first pop", popped), ("acknowledgement", acked))
}

figure, axes = plt.subplots()
for name, within_ms in latencies.items():
    axes.plot([max(1, latency) for latency in within_ms.values()], percents, label=name)
    print(f"from publish to {name}: half within {within_ms[50]} ms, 99 % within {within_ms[99]} ms")
axes.set(title="Time since the publish", xscale="log", xlabel="milliseconds", ylabel="% of messages", ylim=(0, 101))
axes.legend(loc="upper left", frameon=False)
figure.savefig(out_dir / "latency.svg", metadata={"Date": None})

# %% [markdown]
# ## Unusual readings
#
# The demo publishes as fast as it can, but each body has the time at which the device has measured: one reading a second. A job
# takes any rows with the columns that it uses, so this time can take the place of the time of storing.

# %%
measured = published.withColumn("at_ms", F.get_json_object(F.col("body").cast("string"), "$.ts_ms").cast("bigint"))
readings = deviations(measured, value_path="$.celsius", sigmas=6).cache()
print(f"{readings.where('is_unusual').count()} unusual readings")
(most,) = readings.groupBy("topic").agg(F.count_if("is_unusual").alias("unusual")).orderBy(F.desc("unusual"), "topic").take(1)
shown: pandas.DataFrame = readings.where(F.col("topic") == most.topic).orderBy("time").toPandas()
unusual = shown[shown["is_unusual"] == True]  # noqa: E712  (null is neither)

figure, axes = plt.subplots()
axes.plot(shown["time"], shown["mean"], color="tab:gray", linewidth=1, label="mean of the last 20")
axes.plot(shown["time"], shown["value"], marker=".", markersize=3, linewidth=0.8, label="reading")
axes.plot(unusual["time"], unusual["value"], "o", color="tab:red", markersize=7, fillstyle="none", label="unusual")
axes.set(title=most.topic, ylabel="°C")
axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
figure.savefig(out_dir / "temperature.svg", metadata={"Date": None})

# %% [markdown]
# ## Silent devices
#
# No device of the demo falls silent. So the notebook pulls the plug of one: its readings of the last half minute are left out.

# %%
is_unplugged = F.col("topic").endswith("device-0003/temperature")
(last,) = measured.agg(F.max("at_ms").alias("ms")).collect()
silences(measured.where(~is_unplugged | (F.col("at_ms") < last.ms - 30_000)), device_level=3, times=10).where(
    "is_silent"
).show()

# %% [markdown]
# ## Traffic and retention
#
# How much each line publishes, and what to write into the options `store.retention_bytes` and `store.retention`.

# %%
traffic(published, levels=2).show()
retention_plan(published, levels=2, disk_bytes=100 * 10**9, days=7).orderBy("prefix").show()

# %% [markdown]
# ## A stream
#
# A stream has each message once, also if it is stopped and goes on from its checkpoint. With `availableNow` it reads what is
# there and ends. Without, it goes on beside the node. The checkpoint is in OUT_DIR, so take another one for another log.

# %%
followed = spark.readStream.format("penstock").option("topic", "plant/#").load(str(data_dir))
query = (
    followed.select(
        "time", "topic", F.get_json_object(F.col("body").cast("string"), "$.celsius").cast("double").alias("celsius")
    )
    .writeStream.format("parquet")
    .option("path", str(out_dir / "readings"))
    .option("checkpointLocation", str(out_dir / "checkpoint"))
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
print(f"{spark.read.parquet(str(out_dir / 'readings')).count():,} readings in Parquet")

# %% [markdown]
# ## Reconciliation
#
# Each delivery has one outcome: nothing was lost, and what the killed consumer held was delivered again.

# %%
summary = reconcile(spark, data_dir, out_dir / "report")
print(
    f"{summary['totals']['deliveries']:,} deliveries:",
    {name: count for name, count in summary["totals"]["outcomes"].items() if count},
)
print(f"The report is {out_dir / 'report' / 'report.html'}.")

//! What an operator may choose about membership.

use std::time::Duration;

use crate::limits::INDIRECT_PINGS_MAX;

/// The settings of membership. All nodes of a mesh should have the same ones; a mesh whose nodes
/// differ works, at the pace of the slower settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwimConfig {
    /// How often a node probes one other. 10 ms to 60 s, default 500 ms.
    ///
    /// A shorter period finds a death sooner, costs more datagrams, and asks more of the slowest
    /// path: a round trip has to fit the period.
    pub protocol_period: Duration,
    /// How many others are asked to ping a member that did not answer. 0 to 16, default 3.
    ///
    /// More of them forgive more loss, for more datagrams when someone is really dead.
    pub indirect_ping_count: usize,
    /// A suspicion lasts this many periods times `ln(N + 1)`. 1 to 64, default 4.
    ///
    /// A longer suspicion gives a slow member more time to refute; a dead one is noticed later.
    pub suspicion_multiplier: u32,
    /// An update is sent this many times `log2(N + 1)`. 1 to 64, default 4.
    ///
    /// More copies reach everybody under more loss; they crowd out loads while they last.
    pub retransmit_multiplier: u32,
    /// How often a node exchanges its whole table with a random other. One period to an hour,
    /// default 30 s.
    ///
    /// It mends what dissemination missed. It costs the whole table each way.
    pub sync_interval: Duration,
    /// The longest pause between two attempts to reach one dead member or one seed that is down.
    /// One period to an hour, default 60 s.
    ///
    /// It bounds how long a partition outlives its cause.
    pub redial_interval_max: Duration,
    /// How long a dead or departed member is remembered. At least four sync intervals, default 6 h.
    ///
    /// A partition that lasts longer is healed by seeds alone.
    pub tombstone_retention: Duration,
}

impl Default for SwimConfig {
    fn default() -> Self {
        Self {
            protocol_period: Duration::from_millis(500),
            indirect_ping_count: 3,
            suspicion_multiplier: 4,
            retransmit_multiplier: 4,
            sync_interval: Duration::from_secs(30),
            redial_interval_max: Duration::from_secs(60),
            tombstone_retention: Duration::from_secs(6 * 3_600),
        }
    }
}

/// Why settings of membership cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A duration is out of its range.
    #[error("{field} is {value:?}, it must be {min:?} to {max:?}")]
    Duration {
        /// Which.
        field: &'static str,
        /// As given.
        value: Duration,
        /// The least.
        min: Duration,
        /// The most.
        max: Duration,
    },
    /// A number is out of its range.
    #[error("{field} is {value}, it must be {min} to {max}")]
    Number {
        /// Which.
        field: &'static str,
        /// As given.
        value: usize,
        /// The least.
        min: usize,
        /// The most.
        max: usize,
    },
}

impl SwimConfig {
    /// Checks every range.
    ///
    /// # Errors
    /// [`ConfigError`] for the first setting that is out of its range.
    pub fn validate(&self) -> Result<(), ConfigError> {
        const HOUR: Duration = Duration::from_secs(3_600);
        let period = self.protocol_period;
        duration("protocol_period", period, Duration::from_millis(10), Duration::from_secs(60))?;
        number("indirect_ping_count", self.indirect_ping_count, 0, INDIRECT_PINGS_MAX)?;
        number("suspicion_multiplier", self.suspicion_multiplier as usize, 1, 64)?;
        number("retransmit_multiplier", self.retransmit_multiplier as usize, 1, 64)?;
        duration("sync_interval", self.sync_interval, period, HOUR)?;
        duration("redial_interval_max", self.redial_interval_max, period, HOUR)?;
        let retention = self.tombstone_retention;
        duration("tombstone_retention", retention, 4 * self.sync_interval, 24 * 365 * HOUR)
    }
}

fn duration(
    field: &'static str,
    value: Duration,
    min: Duration,
    max: Duration,
) -> Result<(), ConfigError> {
    if value < min || value > max {
        return Err(ConfigError::Duration { field, value, min, max });
    }
    Ok(())
}

fn number(field: &'static str, value: usize, min: usize, max: usize) -> Result<(), ConfigError> {
    if value < min || value > max {
        return Err(ConfigError::Number { field, value, min, max });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid_and_a_bad_setting_is_named() {
        assert_eq!(SwimConfig::default().validate(), Ok(()));
        let bad = SwimConfig { indirect_ping_count: 17, ..SwimConfig::default() };
        assert_eq!(
            bad.validate().unwrap_err().to_string(),
            "indirect_ping_count is 17, it must be 0 to 16"
        );
        let bad = SwimConfig { protocol_period: Duration::from_millis(9), ..SwimConfig::default() };
        assert_eq!(
            bad.validate().unwrap_err().to_string(),
            "protocol_period is 9ms, it must be 10ms to 60s"
        );
        let bad =
            SwimConfig { tombstone_retention: Duration::from_secs(1), ..SwimConfig::default() };
        assert!(bad.validate().is_err(), "a tombstone outlives the syncs that it guards against");
    }
}

//! On what ranks run: this machine's GPUs or the simulator.

use crate::BadOption;
use crate::asking::{self, Gpus};
use crate::installation::SimulatorLibraries;
use crate::search;
use anyhow::{Result, bail};
use clap::Args;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The flags that choose.
#[derive(Args, Clone, Copy, Debug, Default)]
#[group(multiple = false)]
pub struct MachineRequest {
    /// Ranks run on the simulator, even where there are GPUs [default: on two or more GPUs, else on the simulator]
    #[arg(long = "sim")]
    simulator: bool,
    /// Ranks run on GPUs; the command fails where there are none
    #[arg(long)]
    gpu: bool,
    /// For the driver's answer; none: the usual one.
    #[arg(skip)]
    limit: Option<Duration>,
}

impl MachineRequest {
    /// The simulator, or GPUs and nothing else; the driver has to answer within a time.
    pub fn within(limit: Duration, simulator: bool) -> MachineRequest {
        MachineRequest { simulator, gpu: !simulator, limit: Some(limit) }
    }
}

/// What was chosen.
#[derive(Debug, PartialEq)]
pub enum Choice {
    Gpus,
    Simulator,
}

/// Decides, with the reason in words.
fn choose(request: MachineRequest, asked: &Result<Gpus, String>) -> Result<(Choice, String), String> {
    if request.simulator {
        return Ok((Choice::Simulator, "--sim asks for it".into()));
    }
    match asked {
        Ok(gpus) if gpus.devices.len() >= 2 || (request.gpu && !gpus.devices.is_empty()) => {
            Ok((Choice::Gpus, format!("{} × {}", gpus.devices.len(), gpus.devices[0].name)))
        }
        Ok(_) if request.gpu => Err("expected GPUs, the driver has 0; --sim takes the simulator".into()),
        Ok(gpus) => Ok((Choice::Simulator, format!("{} GPU where two are needed", gpus.devices.len()))),
        Err(reason) if request.gpu => Err(format!("expected GPUs: {reason}; --sim takes the simulator")),
        Err(reason) => Ok((Choice::Simulator, reason.clone())),
    }
}

/// A machine made ready for ranks.
pub struct Machine {
    pub gpus: Gpus,
    /// The library that is called "real" here: NVIDIA's, or the simulator.
    pub nccl: PathBuf,
    /// Why this machine.
    pub why: String,
    simulator: Option<SimulatorLibraries>,
}

impl Machine {
    /// Asks, chooses and prepares; `nccl` finds the real library when GPUs are chosen. One that was `named` is not for
    /// the simulator, whose NCCL is its own.
    pub fn prepare(
        request: MachineRequest,
        named: Option<&Path>,
        nccl: impl FnOnce() -> Result<PathBuf>,
    ) -> Result<Self> {
        let limit = request.limit.unwrap_or(asking::TIME_LIMIT);
        let asked = if request.simulator {
            Err(String::new())
        } else {
            asking::gpus(None, limit).map_err(|error| format!("{error:#}"))
        };
        match (choose(request, &asked), asked) {
            (Err(reason), _) => bail!("{reason}"),
            (Ok((Choice::Gpus, why)), Ok(gpus)) => Ok(Self { gpus, nccl: nccl()?, why, simulator: None }),
            (Ok((_, why)), _) => {
                if let Some(named) = named {
                    bail!(
                        "--nccl {}: the simulator has its own NCCL, and no GPUs are used ({why})",
                        named.display()
                    );
                }
                let simulator = SimulatorLibraries::lay_out()?;
                let gpus = asking::gpus(Some(&simulator.library_path()), limit)?;
                Ok(Self { gpus, nccl: simulator.nccl(), why, simulator: Some(simulator) })
            }
        }
    }

    /// For `demo`, `bench` and `tune`, which search for the real library if none was named.
    pub fn for_tools(request: MachineRequest, named: Option<&Path>) -> Result<Self> {
        Self::prepare(request, named, || search::for_tools(named))
    }

    /// For commands whose answer is about this machine: the simulator only where the user asks for it.
    pub fn gpus_unless_asked(request: MachineRequest, named: Option<&Path>) -> Result<Self> {
        Self::for_tools(MachineRequest { gpu: !request.simulator, ..request }, named)
    }

    pub fn is_simulated(&self) -> bool {
        self.simulator.is_some()
    }

    /// One line for the user.
    pub fn describe(&self) -> String {
        match self.simulator {
            Some(_) => format!("on the simulator ({})", self.why),
            None => format!("on {}, NCCL {}", self.why, self.nccl.display()),
        }
    }

    /// How many ranks to run: what was asked for, `least` or more, or as many as there are devices up to `usual`.
    pub fn ranks(&self, asked: Option<usize>, least: usize, usual: usize) -> Result<usize> {
        let devices = self.gpus.devices.len();
        match asked {
            None if devices >= least => Ok(usual.min(devices)),
            None => bail!("expected {least} GPUs or more, this machine has {devices}"),
            Some(ranks) if (least..=devices).contains(&ranks) => Ok(ranks),
            Some(ranks) => {
                let owner = if self.is_simulated() { "the simulator" } else { "this machine" };
                bail!(BadOption(format!(
                    "--ranks {ranks}: expected {least} to {devices}, because {owner} has {devices} devices, one a rank"
                )))
            }
        }
    }

    /// `LD_LIBRARY_PATH` for questions to the simulator; none on GPUs.
    pub fn library_path(&self) -> Option<OsString> {
        self.simulator.as_ref().map(SimulatorLibraries::library_path)
    }

    /// Variables for rank processes that open the real library and Windlass over it.
    pub fn environment(&self) -> Vec<(OsString, OsString)> {
        let mut environment = vec![("WINDLASS_NCCL".into(), self.nccl.clone().into())];
        if let Some(simulator) = &self.simulator {
            environment.push(("LD_LIBRARY_PATH".into(), simulator.library_path()));
            // Leaks and misuse fail the run.
            environment.push(("WINDLASS_SIM_STRICT".into(), "1".into()));
        }
        environment
    }

    /// The name of the devices.
    pub fn device_name(&self) -> &str {
        self.gpus.devices.first().map_or("no device", |device| &device.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::asking::Device;

    fn gpus(count: usize) -> Result<Gpus, String> {
        Ok(Gpus {
            devices: vec![Device { name: "H200".into(), ..Device::default() }; count],
            ..Gpus::default()
        })
    }

    /// Two GPUs are used unless the simulator is asked for; fewer fall back, saying why.
    #[test]
    fn choices() {
        let any = MachineRequest::default();
        assert_eq!(choose(any, &gpus(4)).unwrap(), (Choice::Gpus, "4 × H200".into()));
        assert_eq!(choose(any, &gpus(1)).unwrap().0, Choice::Simulator);
        assert_eq!(choose(any, &Err("no driver".into())).unwrap(), (Choice::Simulator, "no driver".into()));
        let simulator = MachineRequest { simulator: true, ..any };
        assert_eq!(choose(simulator, &gpus(4)).unwrap().0, Choice::Simulator);
        let gpu = MachineRequest { gpu: true, ..any };
        assert_eq!(choose(gpu, &gpus(1)).unwrap().0, Choice::Gpus);
        assert!(choose(gpu, &Err("no driver".into())).unwrap_err().contains("no driver"));
    }
}

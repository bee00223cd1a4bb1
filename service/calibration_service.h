// CalibrationService: the calls of calibrations.proto.
#pragma once

#include "kvstow/v1/calibrations.grpc.pb.h"
#include "service/service_parts.h"

namespace kvstow {

class CalibrationService final : public v1::Calibrations::CallbackService {
 public:
  // `parts` must outlive the server this is registered with.
  explicit CalibrationService(const ServiceParts& parts) : parts_(parts) {}

  grpc::ServerReadReactor<v1::PutCalibrationRequest>* PutCalibration(
      grpc::CallbackServerContext* context, v1::PutCalibrationResponse* response) override;
  grpc::ServerWriteReactor<v1::GetCalibrationResponse>* GetCalibration(
      grpc::CallbackServerContext* context, const v1::GetCalibrationRequest* request) override;
  grpc::ServerUnaryReactor* ListCalibrations(grpc::CallbackServerContext* context,
                                             const v1::ListCalibrationsRequest* request,
                                             v1::ListCalibrationsResponse* response) override;
  grpc::ServerUnaryReactor* DeleteCalibration(grpc::CallbackServerContext* context,
                                              const v1::DeleteCalibrationRequest* request,
                                              v1::DeleteCalibrationResponse* response) override;

 private:
  const ServiceParts& parts_;
};

}  // namespace kvstow
